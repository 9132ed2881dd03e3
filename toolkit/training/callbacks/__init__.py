"""Callbacks: metrics, console, samples, best checkpoint, checks, and the base class for user callbacks."""

from toolkit.training.callbacks.best import EarlyStopping, KeepBest
from toolkit.training.callbacks.console import Console
from toolkit.training.callbacks.metrics import ExternalLoggers, MetricsFile, ThroughputMonitor
from toolkit.training.callbacks.mixture import MixtureShares
from toolkit.training.callbacks.profile import Profile
from toolkit.training.callbacks.replicas import ReplicaCheck
from toolkit.training.callbacks.samples import Sampler
from toolkit.training.callbacks.spikes import SkipSpikes
from toolkit.training.callbacks.upload import Upload
from toolkit.training.run import Callback

__all__ = [
    "Callback", "Console", "EarlyStopping", "ExternalLoggers", "KeepBest", "MetricsFile", "MixtureShares", "Profile",
    "ReplicaCheck", "Sampler", "SkipSpikes", "ThroughputMonitor", "Upload",
]  # fmt: skip
