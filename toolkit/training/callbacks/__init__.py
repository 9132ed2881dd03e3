"""Callbacks: metrics, console, samples, best checkpoint, checks, and the base class for user callbacks."""

from toolkit.training.run import Callback

__all__ = ["Callback"]
