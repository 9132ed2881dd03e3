"""N1 exact-accumulation: divide a global batch into micro-batches."""

from dataclasses import dataclass

from toolkit.errors import UserError


@dataclass(frozen=True)
class BatchPlan:
    """``global_batch_size`` x ``answers`` = ``micro_batch_size`` x ``data_parallel`` x ``accumulation``, exactly."""

    global_batch_size: int
    micro_batch_size: int
    data_parallel: int
    accumulation: int
    answers: int = 1

    def __str__(self) -> str:
        answers = f" x {self.answers} answers" if self.answers > 1 else ""
        return (
            f"global batch {self.global_batch_size}{answers} = micro batch {self.micro_batch_size} x "
            f"{self.data_parallel} device{'s' if self.data_parallel > 1 else ''} x {self.accumulation} accumulated"
        )


UNKNOWN_BATCH = BatchPlan(0, 0, 1, 0)


def plan_batch(
    global_batch_size: int,
    micro_batch_size: int,
    devices: int = 1,
    num_nodes: int = 1,
    model_parallel: int = 1,
    answers: int = 1,
) -> BatchPlan:
    """Divide the global batch into equal micro-batches. ``model_parallel`` ranks read the same rows."""
    world_size = devices * num_nodes // model_parallel
    unit = world_size * micro_batch_size
    if global_batch_size % unit == 0:
        accumulation = global_batch_size // unit * answers
        return BatchPlan(global_batch_size, micro_batch_size, world_size, accumulation, answers)
    below, above = global_batch_size // unit * unit, -(-global_batch_size // unit) * unit
    batches = " or ".join(str(n) for n in (below, above) if n)
    per_rank, rest = divmod(global_batch_size, world_size)
    micro = max((m for m in range(1, min(per_rank, micro_batch_size) + 1) if per_rank % m == 0), default=0)
    hint = f"use --train.global_batch_size {batches}"
    if micro and not rest:
        hint += f", or --train.micro_batch_size {micro}"
    ranks = f"{devices} devices x {num_nodes} nodes"
    if model_parallel > 1:
        ranks += f" / {model_parallel} model parallel"
    raise UserError(
        f"--train.global_batch_size {global_batch_size}: not a multiple of {unit} = {ranks} "
        f"x --train.micro_batch_size {micro_batch_size}; {hint}"
    )
