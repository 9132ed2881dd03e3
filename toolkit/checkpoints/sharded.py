"""Temporary alias until training/checkpointer.py imports the new name."""

from toolkit.checkpoints.run.sharded import check_sharded, save_sharded  # noqa: F401
