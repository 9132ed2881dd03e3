"""Store a run's checkpoints and metrics on any fsspec file system. Does not import torch."""
