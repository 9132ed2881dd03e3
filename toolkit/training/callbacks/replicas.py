"""N4 synchronized-replicas: copies of the model are compared after the first step of each launch."""

from __future__ import annotations

from toolkit.training.callbacks.base import Callback, Trainer
from toolkit.training.model import ModelSpec, check_replicas


class ReplicaCheck(Callback):
    """Compares checksums of the shards over the replicas, once.

    Args:
        spec: Of the model, before it was wrapped.
        shards: Ranks that one copy of the model is sharded over.
    """

    def __init__(self, spec: ModelSpec, shards: int) -> None:
        self.spec, self.shards, self.is_done = spec, shards, False

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """
        Raises:
            GuardError: replicas differ.
        """
        if not self.is_done:
            check_replicas(trainer.model, self.spec, self.shards)
            self.is_done = True
