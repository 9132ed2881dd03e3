"""Facts about a run that the table of unsupported options checks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from toolkit.config import COMPILERS, DDPArgs, FSDPArgs
from toolkit.distributed.stages import STAGES_PER_RANK, nearest_micro_batches
from toolkit.errors import option_text
from toolkit.extension import registered
from toolkit.models.families import family_of
from toolkit.planning.batch import BatchPlan
from toolkit.planning.run_args import RunArgs

if TYPE_CHECKING:
    from toolkit.distributed.strategy import StrategyPlan
    from toolkit.models.config import ModelConfig


@dataclass(frozen=True)
class Facts:
    """Facts about a run that the table checks. None, "" and 0 mean unknown; rows about unknown facts do not apply.

    Args:
        precision: The resolved precision.
        device: "cpu", "cuda" or "mps".
        world_size: Processes of the run.
        strategy: The resolved strategy.
        batch: The division of the global batch.
        has_moments: Whether the optimizer keeps state with the shape of the weights.
        needs_unsharded: Whether the optimizer's class sets ``needs_unsharded``.
        model: The architecture.
    """

    args: RunArgs
    precision: str = ""
    device: str = ""
    world_size: int = 0
    strategy: StrategyPlan | None = None
    batch: BatchPlan | None = None
    has_moments: bool = True
    needs_unsharded: bool = False
    model: ModelConfig | None = None

    @property
    def strategy_name(self) -> str:
        return "" if self.strategy is None else self.strategy.extension or self.strategy.kind

    @property
    def is_fsdp(self) -> bool:
        """Whether the strategy, which may be an extension's, shards weights."""
        return self.strategy is not None and self.strategy.kind == "fsdp"

    @property
    def is_extension(self) -> bool:
        """Whether the strategy is an extension's."""
        return self.strategy is not None and self.strategy.extension is not None

    @property
    def accumulation(self) -> int:
        return 1 if self.batch is None else self.batch.accumulation

    @property
    def samples_per_device(self) -> int:
        """Sequences of the global batch on one device."""
        return 0 if self.batch is None else self.batch.global_batch_size // self.batch.data_parallel

    @property
    def is_builtin(self) -> bool:
        """Whether the optimizer is one of torch's or of :mod:`toolkit.optim.hybrid`."""
        return self.args.optimizer_class is None and self.args.optimizer.name not in registered("optimizers")

    @property
    def unused_fsdp(self) -> str:
        """The first FSDP option that has no effect, as a flag with value; "" if there is none."""
        if self.strategy is None or self.strategy_name == "fsdp":
            return ""
        allowed = ["state_dict_type"]
        if self.strategy.extension is None:
            allowed += ["sharding_strategy", *(["cpu_offload"] if self.device == "cpu" else [])]
        return _first_changed("fsdp", self.args.fsdp, allowed)

    @property
    def model_parallel_flag(self) -> str:
        """The first option that enables model parallelism, as a flag with value; "" if there is none."""
        sizes = {name: getattr(self.args, f"{name}_parallel_size") for name in ("tensor", "context", "pipeline")}
        return next((f"--{name}_parallel_size {size}" for name, size in sizes.items() if size > 1), "")

    @property
    def is_extension_model(self) -> bool:
        return self.model is not None and family_of(self.model).model_class() is not None

    @property
    def has_tied_embeddings(self) -> bool:
        return self.model is not None and self.model.tie_embeddings

    @property
    def not_in_fp8(self) -> str:
        """The first option that --train.fp8 does not support, with its value; "" if there is none."""
        args = self.args
        unsupported = {
            f"--tensor_parallel_size {args.tensor_parallel_size}": args.tensor_parallel_size > 1,
            f"--strategy {self.strategy_name}": self.is_extension,
            f"--compiler {args.compiler}": args.compiler not in COMPILERS,
            "a user-provided module": args.module is not None,
        }
        return next((name for name, is_used in unsupported.items() if is_used), "")

    @property
    def n_stages(self) -> int:
        return self.args.pipeline_parallel_size * STAGES_PER_RANK[self.args.pipeline.schedule]

    @property
    def uneven_stages(self) -> str:
        """The sizes whose stages have equally many layers, if this one's do not; "" if they do."""
        if self.model is None or self.model.n_layer % self.n_stages == 0:
            return ""
        layers, per_rank = self.model.n_layer, STAGES_PER_RANK[self.args.pipeline.schedule]
        sizes = [str(n) for n in range(1, layers + 1) if layers % (n * per_rank) == 0]
        return ", ".join(sizes) or "--pipeline.schedule 1f1b"

    @property
    def enough_micro_batches(self) -> str:
        """Global batch sizes with enough micro-batches per step for the pipeline; "" if there are enough."""
        if self.batch is None:
            return ""
        schedule, size = self.args.pipeline.schedule, self.args.pipeline_parallel_size
        nearest = nearest_micro_batches(schedule, size, self.accumulation)
        rows = self.batch.global_batch_size // self.accumulation
        return "" if self.accumulation in nearest else " or ".join(str(n * rows) for n in nearest)

    @property
    def objective_name(self) -> str:
        return type(self.args.objective).__name__

    @property
    def data_name(self) -> str:
        return type(self.args.data).__name__

    @property
    def unused_ddp(self) -> str:
        return "" if self.strategy_name in ("", "ddp") else _first_changed("ddp", self.args.ddp, [])

    def text(self, name: str) -> str:
        """Format a value as on the command line. ``name`` is a dotted attribute of this object or of ``args``."""
        return option_text(attrgetter(name)(self if hasattr(self, name.partition(".")[0]) else self.args))


def _first_changed(group: str, args: FSDPArgs | DDPArgs, allowed: list[str]) -> str:
    """Return the first option with a non-default value, except ``allowed`` names, as a flag with value; else ""."""
    for field in fields(args):
        value = getattr(args, field.name)
        if field.name not in allowed and value != field.default:
            return f"--{group}.{field.name} {option_text(value)}"
    return ""
