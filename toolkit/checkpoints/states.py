"""Temporary alias until training/checkpointer.py imports the new name."""

from toolkit.checkpoints.run.states import adapter_state, full_state, sharded_state, tied_names  # noqa: F401
