"""Record loss, gradient norm and per-parameter gradient norms at each step, equal on every rank."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit.distributed import ranks
from toolkit.distributed.model_parts import cuts_of
from toolkit.distributed.names import canonical_name
from toolkit.distributed.replicas import checksum
from toolkit.errors import DifferenceError
from toolkit.private_torch import local_parts, local_shard
from toolkit.training.model_spec import unwrapped
from toolkit.training.run import Callback, Run

_CHUNK = 1 << 22  # elements


class StepRecord(NamedTuple):
    """Loss and gradient norms of one optimizer step.

    Args:
        loss: Mean over the supervised tokens of the global batch, in nats.
        logged_norm: Gradient norm before clipping, as logged and used for clipping. On a CPU torch sums squares
            sequentially in fp32: measured 0.5 % too small for one tensor of 65 million elements.
        gradients: Gradient norm of each parameter before clipping, by name, summed in fp64.
    """

    loss: float
    logged_norm: float
    gradients: dict[str, float]

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return math.sqrt(sum(norm**2 for norm in self.gradients.values()))


class GradientRecorder(Callback):
    """Records every step, and compares gradients between ranks that hold the same parameters."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._gradients: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Run) -> None:
        self._gradients = gradient_norms(unwrapped(trainer.model), trainer.progress.step + 1)

    def on_step_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        norm, limit = metrics["grad_norm"], trainer.args.train.max_norm
        clipped_by = max(1.0, (norm + 1e-6) / limit) if limit else 1.0  # as torch.nn.utils.clip_grad_norm_
        gradients = {name: value * clipped_by for name, value in self._gradients.items()}
        self.records.append(StepRecord(metrics["loss"], norm, gradients))


def gradient_norms(module: nn.Module, step: int) -> dict[str, float]:
    """Return the gradient norm of each trained parameter over all ranks. Collective. Error messages name ``step``."""
    parameters = {canonical_name(name): p for name, p in module.named_parameters() if p.requires_grad}
    sharded, cuts = local_parts(module), cuts_of(module)
    layout = ranks.layout()
    gradients = [local_shard(p.grad) if p.grad is not None else torch.zeros(0) for p in parameters.values()]
    everywhere = ranks.all_gather_object([(_sum_of_squares(g), checksum(g)) for g in gradients])
    norms = {}
    for i, (name, parameter) in enumerate(parameters.items()):
        holders = layout.first_holders(id(parameter) in sharded, name in cuts)
        for rank, holder in enumerate(holders):
            if everywhere[rank][i][1] != everywhere[holder][i][1]:
                raise DifferenceError(
                    f"step {step}: the gradient of {name} differs between ranks {holder} and {rank}, which hold the "
                    "same part of it: it was not reduced over them correctly; run `toolkit doctor`, or try another "
                    "--strategy"
                )
        norms[name] = math.sqrt(sum(everywhere[rank][i][0] for rank in sorted(set(holders))))
    return norms


def _sum_of_squares(tensor: Tensor) -> float:
    """Return the sum of squares in fp64, without an fp64 copy of the complete tensor."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    for chunk in tensor.detach().flatten().split(_CHUNK):
        total += chunk.double().square().sum()
    return float(total)
