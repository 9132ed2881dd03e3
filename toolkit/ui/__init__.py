"""Output of a run: progress, metrics files, loggers, plots. Takes plain values; does not import torch."""
