"""Optimizers, learning rate schedules, clipping and parameter groups."""

HYBRID_OPTIMIZERS = ("Muon", "AdamW8bit")
"""Names of the optimizers in :mod:`toolkit.optim.hybrid`. They are here because that module imports torch."""
