"""Reports of runs: read what a run has written, and render it as one HTML page or as Markdown. No torch."""
