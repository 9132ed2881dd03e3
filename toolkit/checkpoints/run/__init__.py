"""A run's training state: optimizer and loop, in one file or sharded, and where to resume."""
