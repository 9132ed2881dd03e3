"""Callbacks: metrics, console, samples, best checkpoint, checks, and the base class for user callbacks."""

from toolkit.training.callbacks.best import EarlyStopping, KeepBest
from toolkit.training.callbacks.metrics import ThroughputMonitor
from toolkit.training.run import Callback

__all__ = ["Callback", "EarlyStopping", "KeepBest", "ThroughputMonitor"]
