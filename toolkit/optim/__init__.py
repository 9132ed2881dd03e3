"""Optimizers, learning rate schedules, clipping and parameter groups."""
