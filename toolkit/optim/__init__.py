"""Optimizers, learning rate schedules, clipping and parameter groups."""

HYBRID_OPTIMIZERS = ("Muon", "AdamW8bit")
"""Optimizers of :mod:`toolkit.optim.hybrid`, by name: that module imports torch."""
