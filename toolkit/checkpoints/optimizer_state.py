"""Temporary alias until training/checkpointer.py imports the new name."""

from toolkit.checkpoints.run.optimizer_state import load_optimizer  # noqa: F401
