"""The inputs of the memory estimate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from toolkit.config import ActivationCheckpointing, DDPArgs, FSDPArgs, Precision
from toolkit.distributed.mesh import Layout
from toolkit.distributed.strategy import StrategyPlan
from toolkit.models.config import ModelConfig
from toolkit.models.kv_cache import KVCache
from toolkit.models.lora_config import LoRAConfig, Quantize
from toolkit.planning.resolve import ResolvedConfig

FP32 = 4  # bytes
P = ParamSpec("P")
T = TypeVar("T")


def cached_by_text(function: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of a function by the text of its arguments, which need not be hashable."""
    results: dict[str, T] = {}

    @wraps(function)
    def cached(*args: P.args, **options: P.kwargs) -> T:
        key = f"{args} {options}"
        if key not in results:
            results[key] = function(*args, **options)
        return results[key]

    return cached


@dataclass(frozen=True)
class MemoryInputs:
    """The properties of a run that determine its memory.

    Args:
        config: The architecture, including the vocabulary size.
        micro_batch_size: Sequences per forward pass on one device.
        accumulation: Micro-batches per optimizer step.
        seq_length: Tokens per sequence.
        optimizer: Options from :func:`toolkit.optim.classes.resolve_optimizer`.
        device: "cuda", "cpu" or "mps".
        lora: Adapter configuration; None trains all weights.
        quantize: One of :data:`toolkit_plan.measure.parameters.SCALES_4BIT`; None does not quantize.
        packed: Whether several documents share a row, without attention between them.
        fsdp: FSDP options; ``accumulate`` is resolved.
        optimizer_class: User-provided optimizer class outside torch.optim.
        in_backward: Whether weights are updated, and gradients freed, during the backward pass.
        async_save: Whether checkpoints are written from a copy of the state.
        schedule: The pipeline schedule, see :class:`toolkit.config.PipelineArgs`.
        frozen: The architecture of the objective's frozen model; None if it needs none.
        gathers_weights: Whether FSDP gathers all weights while the objective generates answers.
        kv_cache: Bytes of the KV cache then.
        ema: Decay rate of the moving average of the weights; None without one.
    """

    config: ModelConfig
    precision: Precision
    strategy: StrategyPlan
    micro_batch_size: int
    accumulation: int
    seq_length: int
    optimizer: dict[str, Any]
    device: str = "cuda"
    lora: LoRAConfig | None = None
    quantize: Quantize | None = None
    packed: bool = False
    fsdp: FSDPArgs = field(default_factory=FSDPArgs)
    ddp: DDPArgs = field(default_factory=DDPArgs)
    optimizer_class: type[torch.optim.Optimizer] | None = None
    activation_checkpointing: ActivationCheckpointing = "none"
    fp8: str = "none"
    residual_dtype: str = "auto"
    in_backward: bool = False
    async_save: bool = False
    schedule: str = "1f1b"
    frozen: ModelConfig | None = None
    gathers_weights: bool = False
    kv_cache: int = 0
    ema: float | None = None

    def of_micro_batch(self, frozen: ModelConfig | None = None) -> MemoryInputs:
        """Return what the passes of a micro-batch on one device depend on, with another frozen model; others unset."""
        layout = Layout(context=self.strategy.layout.context, tensor=self.tensor)
        strategy = StrategyPlan("fsdp" if self.strategy.kind == "fsdp" else "single", None, layout, "")
        unset: dict[str, Any] = {"optimizer": {}, "optimizer_class": None, "async_save": False, "schedule": "1f1b"}
        unset |= {"accumulation": 1, "fsdp": FSDPArgs(), "ddp": DDPArgs(), "ema": None}
        unset |= {"gathers_weights": False, "kv_cache": 0}
        return replace(self, strategy=strategy, frozen=frozen, **unset)

    @property
    def tensor(self) -> int:
        """Ranks over which each layer is divided."""
        return self.strategy.layout.tensor

    @property
    def gathers_fp8(self) -> bool:
        """Whether FSDP all-gathers fp8 layers in fp8, see :func:`toolkit.models.fp8.gather_in_fp8`."""
        return (self.fp8, self.device, self.strategy.offloads) == ("tensorwise", "cuda", False)

    @property
    def weight_bytes(self) -> int:
        return 2 if self.precision in ("bf16-true", "bf16-master") else FP32

    @property
    def residual_bytes(self) -> int:
        return 2 if self.residual_dtype == "bf16" else self.weight_bytes

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return torch.bfloat16 if self.weight_bytes == 2 else torch.float32

    @property
    def compute_bytes(self) -> int:
        """Bytes per element in matrix products."""
        return FP32 if self.precision == "32-true" else 2

    def of_frozen(self) -> MemoryInputs | None:
        """Return the inputs of the frozen model, see :func:`toolkit.training.build.build_frozen`; None without one."""
        if self.frozen is None:
            return None
        precision: Precision = "bf16-true" if self.precision == "bf16-mixed" else self.precision
        options: dict[str, Any] = {"lora": None, "quantize": None, "activation_checkpointing": "none"}
        return replace(self, config=self.frozen, frozen=None, precision=precision, **options)

    @property
    def accumulates_unsharded(self) -> bool:
        """Whether each device keeps all gradients between micro-batches: see distributed/fsdp.py."""
        return self.accumulation > 1 and self.fsdp.accumulate != "sharded"

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer state has an fp32 copy of the weights."""
        return self.precision == "bf16-master"

    @property
    def sums_in_fp32(self) -> bool:
        """Whether gradients of bf16 weights accumulate in fp32."""
        return self.has_masters and self.accumulation > 1

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.micro_batch_size * self.seq_length // self.strategy.layout.context

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the keys and values of one layer that context-parallel ranks gather for a micro-batch."""
        config, latent = self.config, self.config.latent_attention
        assert config.n_query_groups is not None and config.head_size is not None  # set by ModelConfig
        width = 2 * config.n_query_groups * config.head_size // self.tensor
        if latent is not None:
            width = latent["kv_lora_rank"] + latent["qk_rope_head_dim"]
        return self.micro_batch_size * self.seq_length * width * self.compute_bytes


def memory_inputs(config: ResolvedConfig, model: ModelConfig) -> MemoryInputs:
    """Return the inputs of the memory estimate; ``model`` includes the vocabulary size."""
    args, batch, length = config.args, config.batch, config.max_seq_length or model.block_size
    inputs = MemoryInputs(
        config=model,
        precision=config.precision,
        strategy=config.strategy,
        micro_batch_size=batch.micro_batch_size * args.objective.rows_per_sample,
        accumulation=batch.accumulation,
        seq_length=length,
        optimizer=config.optimizer,
        device=config.device,
        lora=args.lora,
        quantize=args.quantize,
        packed=getattr(args.data, "packing", "none") != "none",
        fsdp=config.fsdp,
        ddp=args.ddp,
        optimizer_class=args.optimizer_class,
        activation_checkpointing=args.train.activation_checkpointing,
        fp8=args.train.fp8,
        residual_dtype=args.train.residual_dtype,
        in_backward=args.optimizer.in_backward,
        async_save=args.train.async_save,
        schedule=args.pipeline.schedule,
        frozen=config.frozen,
        gathers_weights=args.objective.gather_weights and config.strategy.extension is None,
        ema=args.train.ema,
    )
    if not args.objective.makes_batches:
        return inputs
    row_bytes = KVCache(model, 1, length + 1, "meta", inputs.dtype, inputs.tensor).nbytes
    return replace(inputs, kv_cache=args.objective.cached_rows(row_bytes) * row_bytes)
