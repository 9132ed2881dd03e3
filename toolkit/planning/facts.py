"""Facts about a run that the table of unsupported options checks. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from toolkit.distributed.stages import STAGES_PER_RANK, nearest_micro_batches
from toolkit.errors import option_text
from toolkit.extension import registered
from toolkit.models.families import is_extension_model
from toolkit.planning.batch_plan import UNKNOWN_BATCH, BatchPlan
from toolkit.planning.run_args import RunArgs

if TYPE_CHECKING:
    from toolkit.distributed.strategy import StrategyPlan
    from toolkit.models.config import ModelConfig


@dataclass(frozen=True)
class Facts:
    """The options of a run, and facts about it that the table checks.

    None, "" and 0 mean unknown; rows about unknown facts do not apply.

    Args:
        precision: The resolved precision.
        device: "cpu", "cuda" or "mps".
        world_size: Processes of the run.
        strategy_plan: The resolved strategy.
        batch: The division of the global batch; :data:`~toolkit.planning.batch_plan.UNKNOWN_BATCH` if unknown.
        has_moments: Whether the optimizer keeps state with the shape of the weights.
        needs_unsharded: Whether the optimizer's class sets ``needs_unsharded``.
        model: The architecture.
        sets_weights: Whether the optimizer averages the weights, see :mod:`toolkit.optim.evaluation_weights`.
    """

    args: RunArgs
    precision: str = ""
    device: str = ""
    world_size: int = 0
    strategy_plan: StrategyPlan | None = None
    batch: BatchPlan = UNKNOWN_BATCH
    has_moments: bool = True
    needs_unsharded: bool = False
    model: ModelConfig | None = None
    sets_weights: bool = False

    def __getattr__(self, name: str) -> Any:
        """Return an option."""
        return getattr(self.args, name)

    @property
    def has_only_experts(self) -> bool:
        """Whether no layer has a dense MLP or a shared expert."""
        model = self.model
        if model is None or model.n_moe_layer < model.n_layer:
            return False
        return model.shared_expert_intermediate_size is None

    @property
    def strategy_name(self) -> str:
        return "" if self.strategy_plan is None else self.strategy_plan.extension or self.strategy_plan.kind

    @property
    def is_fsdp(self) -> bool:
        """Whether the strategy, which may be an extension's, shards weights."""
        return self.strategy_plan is not None and self.strategy_plan.kind == "fsdp"

    @property
    def is_extension(self) -> bool:
        """Whether the strategy is an extension's."""
        return self.strategy_plan is not None and self.strategy_plan.extension is not None

    @property
    def samples_per_device(self) -> int:
        """Sequences of the global batch on one device."""
        return self.batch.global_batch_size // self.batch.data_parallel

    @property
    def is_builtin(self) -> bool:
        """Whether the optimizer is one of torch's or of :mod:`toolkit.optim.hybrid`."""
        return self.optimizer_class is None and self.optimizer.name not in registered("optimizers")

    @property
    def unused_option(self) -> str:
        """The first option of a strategy that the run does not use, as a flag with value; "" if there is none."""
        if self.strategy_plan is None:
            return ""
        allowed = ["fsdp.state_dict_type"]
        if self.strategy_plan.extension is None:
            allowed += ["fsdp.sharding_strategy", *(["fsdp.cpu_offload"] if self.device == "cpu" else [])]
        groups = [group for group in ("fsdp", "ddp") if group != self.strategy_name]
        options = [f"{group}.{field.name}" for group in groups for field in fields(getattr(self, group))]
        unused = (option for option in options if option not in allowed and self.is_set(option))
        return next((f"--{option} {option_text(attrgetter(option)(self))}" for option in unused), "")

    @property
    def is_extension_model(self) -> bool:
        return self.model is not None and is_extension_model(self.model)

    @property
    def has_tied_embeddings(self) -> bool:
        return self.model is not None and self.model.tie_embeddings

    @property
    def n_stages(self) -> int:
        return self.pipeline_parallel_size * STAGES_PER_RANK[self.pipeline.schedule]

    @property
    def uneven_stages(self) -> str:
        """The sizes whose stages have equally many layers, if this one's do not; "" if they do."""
        if self.model is None or self.model.n_layer % self.n_stages == 0:
            return ""
        layers, per_rank = self.model.n_layer, STAGES_PER_RANK[self.pipeline.schedule]
        sizes = [str(n) for n in range(1, layers + 1) if layers % (n * per_rank) == 0]
        return ", ".join(sizes) or "--pipeline.schedule 1f1b"

    @property
    def enough_micro_batches(self) -> str:
        """Global batch sizes with enough micro-batches per step for the pipeline; "" if there are enough."""
        accumulation = self.batch.accumulation
        if not accumulation:
            return ""
        nearest = nearest_micro_batches(self.pipeline.schedule, self.pipeline_parallel_size, accumulation)
        rows = self.batch.global_batch_size // accumulation
        return "" if accumulation in nearest else " or ".join(str(n * rows) for n in nearest)

    @property
    def objective_name(self) -> str:
        return type(self.objective).__name__

    @property
    def data_name(self) -> str:
        return type(self.data).__name__

    def is_set(self, option: str) -> bool:
        """Whether an option has another value than its default."""
        group, _, name = option.rpartition(".")
        values = getattr(self, group) if group else self.args
        return getattr(values, name) != getattr(type(values), name)
