"""N4 synchronized-replicas: compare model replicas after the first step of each launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.distributed.names import canonical_name
from toolkit.distributed.replicas import require_equal_replicas
from toolkit.training.callbacks.base import Callback
from toolkit.training.model import ModelSpec, unwrapped

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


class ReplicaCheck(Callback):
    """Compares shard checksums between replicas, once. ``shards`` is the number of ranks per model replica."""

    def __init__(self, spec: ModelSpec, shards: int) -> None:
        self.spec, self.shards, self.is_done = spec, shards, False

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if not self.is_done:
            parts = {canonical_name(name): p for name, p in unwrapped(trainer.model).named_parameters()}
            sizes = {canonical_name(name): size for name, size in self.spec.sizes.items()}
            require_equal_replicas(parts, sizes, self.shards)
            self.is_done = True
