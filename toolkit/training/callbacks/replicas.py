"""N4 synchronized-replicas: copies of the model are compared after the first step of each launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.training.callbacks.base import Callback
from toolkit.training.model import check_replicas

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


class ReplicaCheck(Callback):
    """Compares checksums of the shards over the replicas, once.

    Args:
        shards: Ranks that one copy of the model is sharded over.
    """

    def __init__(self, shards: int) -> None:
        self.shards, self.is_done = shards, False

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """
        Raises:
            GuardError: replicas differ.
        """
        if not self.is_done:
            check_replicas(trainer.model, trainer.state.model, self.shards)
            self.is_done = True
