"""Checkpoints and metrics of a run on remote storage: any file system of fsspec. Imports no torch."""
