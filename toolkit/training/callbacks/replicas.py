"""N4 synchronized-replicas: compare model replicas after the first step of each launch."""

from toolkit.distributed.model_parts import cuts_of
from toolkit.distributed.names import canonical_name
from toolkit.distributed.replicas import require_equal_replicas
from toolkit.training.model_spec import ModelSpec, unwrapped
from toolkit.training.run import Callback, Metrics, Run, late


class ReplicaCheck(Callback):
    """Compares checksums between ranks that hold the same part of a parameter, once."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.is_done = spec, False

    @late
    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        if not self.is_done:
            module = unwrapped(trainer.model)
            parts = {canonical_name(name): p for name, p in module.named_parameters()}
            sizes = {canonical_name(name): size for name, size in self.spec.sizes.items()}
            require_equal_replicas(parts, sizes, cuts_of(module))
            self.is_done = True
