"""How much memory a training run needs on one device, by part: closed formulas over plain values.

Nothing is allocated and no device is asked. Parameters are those of the model itself on the meta device. Sizes are
bytes; N is the tokens of one micro-batch on one device, c the bytes of a number in the matrix products (2 under bf16
and 16-bit autocast, else 4), r those of the residual stream (4, but 2 under bf16-true).

The peak is in the middle of a step: when the loss has been computed and everything that the backward pass needs is
there. Gradients are there as well when an earlier micro-batch of the step has left them; else they come as activations
go, and the larger of the two counts. torch.compile may keep less than is said here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import nn

from toolkit.args import DDPArgs, FSDPArgs, Precision
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.units import unit_precision
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, Block
from toolkit.models.lora import add_lora, is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.moe import StackedLinear
from toolkit.models.quantize import refuse_experts
from toolkit.training.activations import FP32, activation_bytes, logits_bytes
from toolkit.training.optimizer import optimizer_class
from toolkit.training.throughput import matmul_parameters

# bitsandbytes: 4 bits, and for each 64 weights an fp32 scale; with double quantisation an 8-bit one, and for each 256
# of those an fp32 one (Dettmers et al. 2023, QLoRA, section 3).
QUANTIZED_BYTES = {"bnb.nf4": 0.5 + 4 / 64, "bnb.nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256)}
# What CUDA, cuBLAS and the allocator's gaps take. A rule of thumb, not a formula: contexts measure 0.3 to 0.6 GB.
CUDA_CONTEXT, ALLOCATOR_GAPS = 0.6e9, 0.03


@dataclass(frozen=True)
class Job:
    """What the memory of a run depends on.

    Args:
        config: The architecture, with its vocabulary.
        precision: How to compute.
        strategy: How the devices share the work.
        micro_batch_size: Sequences per forward pass on one device.
        accumulation: Micro-batches per optimizer step.
        seq_length: Tokens per sequence.
        optimizer: What :func:`toolkit.training.optimizer.resolve_optimizer` returns.
        device: "cuda", "cpu" or "mps".
        lora: The adapters; None trains all weights.
        quantize: One of :data:`QUANTIZED_BYTES`; None keeps the weights as they are.
        packed: Several documents share a row, and a mask keeps them apart.
        fsdp: Further options of sharding.
        ddp: Further options of whole copies.
        optimizer_class: A class that torch.optim does not have.
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
    quantize: str | None = None
    packed: bool = False
    fsdp: FSDPArgs = field(default_factory=FSDPArgs)
    ddp: DDPArgs = field(default_factory=DDPArgs)
    optimizer_class: type[torch.optim.Optimizer] | None = None

    @property
    def is_mixed(self) -> bool:
        """Whether autocast computes in 16 bits with weights in fp32."""
        return self.precision.endswith("-mixed")

    @property
    def weight_bytes(self) -> int:
        return 2 if self.precision == "bf16-true" else FP32

    @property
    def compute_bytes(self) -> int:
        """c above."""
        return FP32 if self.precision == "32-true" else 2

    @property
    def tokens(self) -> int:
        """N above."""
        return self.micro_batch_size * self.seq_length


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Args:
        weights: Parameters of the base that this device holds, not quantised.
        quantized_base: Weights in 4 bits, and the largest of them restored for its product.
        adapters: LoRA's parameters.
        gradients: Of all that is trained, in the dtype of the parameters.
        optimizer: The optimizer's state.
        cast_weights: 16-bit copies of the blocks' weights that autocast makes.
        unsharded_unit: What FSDP gathers: the root's unit and two blocks, with the gradients of root and one block.
        activations: What the forward pass keeps for the backward pass.
        logits: A chunk of logits, and the gradients of the head, which are made with it.
        context: CUDA's own, and gaps; see :data:`CUDA_CONTEXT`.
        waits: Whether gradients wait for later micro-batches, beside activations.
    """

    weights: float
    quantized_base: float
    adapters: float
    gradients: float
    optimizer: float
    cast_weights: float
    unsharded_unit: float
    activations: float
    logits: float
    context: float
    waits: bool

    @property
    def total(self) -> float:
        """The peak, see the module's docstring."""
        step = self.cast_weights + self.activations + self.logits
        held = self.weights + self.quantized_base + self.adapters + self.optimizer + self.unsharded_unit
        return held + self.context + (step + self.gradients if self.waits else max(step, self.gradients))

    @property
    def held(self) -> float:
        """What is there at once in every optimizer step, however little the model's activations take."""
        return self.weights + self.quantized_base + self.adapters + self.gradients + self.optimizer

    def parts(self) -> dict[str, float]:
        """The parts by name, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "waits"}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Args:
        total: All, adapters among them; tied ones once.
        trained: Those that the optimizer moves.
        matmul: Those in a matrix product for every token (see :mod:`toolkit.training.throughput`).
    """

    total: int
    trained: int
    matmul: int


def build_on_meta(job: Job) -> GPT:
    """Return the model without values, with its adapters and what they freeze."""
    with torch.device("meta"):
        model = GPT(job.config)
    if job.lora is not None:
        add_lora(model, job.lora)
    return model


def count_parameters(model: nn.Module) -> Parameters:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    return Parameters(sum(size for size, _ in sizes), trained, matmul_parameters(model))


def plan_memory(job: Job, model: GPT | None = None) -> Memory:
    """Return what one device needs for ``job``; ``model`` is :func:`build_on_meta`'s where it is there already."""
    model = build_on_meta(job) if model is None else model
    quantized = _quantized(job, model)
    base = {n: p for n, p in model.named_parameters() if not is_adapter(n) and n not in quantized}
    adapters = [p for n, p in model.named_parameters() if is_adapter(n)]
    own, adapter_bytes = job.weight_bytes, FP32 * sum(p.numel() for p in adapters)
    trained = [p for p in base.values() if p.requires_grad]
    weights = own * _held(job, base.values())
    copies = 1 if job.strategy.kind != "ddp" or job.ddp.gradient_as_bucket_view else 2
    waits = job.accumulation > 1 or job.strategy.kind == "ddp"  # ddp's buckets stay
    # a gradient that waits for its last micro-batch is not reduced yet, so that it is whole: see distributed/fsdp.py
    gradients = own * (_count(trained) if job.accumulation > 1 else _held(job, trained)) + adapter_bytes
    restored = 2 * max((p.numel() for p in quantized.values()), default=0)
    parts = {
        "weights": weights,
        "quantized_base": QUANTIZED_BYTES.get(job.quantize or "", 0) * _count(quantized.values()) + restored,
        "adapters": adapter_bytes,
        "gradients": copies * gradients,
        "optimizer": _optimizer_bytes(job, trained, adapters),
        "cast_weights": _cast_bytes(job, model, quantized),
        "unsharded_unit": _unsharded_bytes(job, model),
        "activations": activation_bytes(job),
        "logits": logits_bytes(job),
    }
    context = CUDA_CONTEXT + ALLOCATOR_GAPS * sum(parts.values()) if job.device == "cuda" else 0
    return Memory(**parts, context=context, waits=waits)


# ---- parameters


def _count(parameters: Any) -> int:
    return sum(p.numel() for p in parameters)


def _held(job: Job, parameters: Any) -> float:
    """Elements of the parameters that one device holds.

    FSDP cuts each unit into equal parts, but leaves vectors whole where it gathers in another dtype.
    """
    parameters = list(parameters)
    if job.strategy.kind != "fsdp":
        return _count(parameters)
    whole = [p for p in parameters if _stays_whole(job, p)]
    return _count(whole) + (_count(parameters) - _count(whole)) / job.strategy.shards


def _stays_whole(job: Job, parameter: nn.Parameter) -> bool:
    return unit_precision(job.fsdp, job.precision)[0] is not None and parameter.ndim < 2


def _quantized(job: Job, model: GPT) -> dict[str, nn.Parameter]:
    """The weights that are kept in 4 bits: those of the blocks' linear layers."""
    if job.quantize is None:
        return {}
    refuse_experts(job.config, job.quantize)
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("transformer.h.")]
    return {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in linears}


def _cast_bytes(job: Job, model: GPT, quantized: dict[str, nn.Parameter]) -> int:
    """Autocast's copies of the blocks' weights and biases; the head's are the loss's. FSDP gathers in 16 bits."""
    if not job.is_mixed or job.strategy.kind == "fsdp":
        return 0
    products = (nn.Linear, StackedLinear)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, products) and n != "lm_head"}
    names = [f"{n}.{p}" for n, m in linears.items() for p, _ in m.named_parameters(recurse=False)]
    return 2 * sum(model.get_parameter(name).numel() for name in names if name not in quantized)


def _unsharded_bytes(job: Job, model: GPT) -> float:
    """What FSDP1 holds whole beside its shards (torch.distributed.fsdp, _runtime_utils).

    The root's unit (embedding, head, last norm) is gathered for the whole step. Of the blocks it holds the one at work
    and the next one; all of them between forward and backward with SHARD_GRAD_OP, or when nothing limits it. A unit's
    gradient is whole until it is reduced, and is copied where it is reduced in another dtype.
    """
    if job.strategy.kind != "fsdp":
        return 0
    unit, root = unit_precision(job.fsdp, job.precision)
    own = job.weight_bytes

    def size(precision: Any, name: str) -> int:
        dtype = getattr(precision, name, None)
        return own if dtype is None else dtype.itemsize

    def sharded(parameters: Any, trained: bool = False) -> int:
        return _count(p for p in parameters if not _stays_whole(job, p) and (p.requires_grad or not trained))

    def base(module: nn.Module) -> list[nn.Parameter]:
        return [p for n, p in module.named_parameters() if not is_adapter(f".{n}")]

    blocks = [base(m) for m in model.modules() if isinstance(m, Block)]
    in_blocks = {id(p) for block in blocks for p in block}
    rest = [p for p in base(model) if id(p) not in in_blocks]
    at_once = 2 if job.strategy.sharding != "SHARD_GRAD_OP" and job.fsdp.limit_all_gathers else len(blocks)
    compute, reduced = size(unit, "param_dtype"), size(unit, "reduce_dtype")
    gathered = compute * sum(sharded(block) for block in blocks[:at_once]) + size(root, "param_dtype") * sharded(rest)
    gradient = (compute + (reduced if reduced != compute else 0)) * sharded(blocks[0], trained=True)
    of_root = 0 if job.accumulation > 1 else own * sharded(rest, trained=True)  # else it is among the gradients
    return gathered + gradient + of_root


# ---- optimizer


def _optimizer_bytes(job: Job, trained: list[nn.Parameter], adapters: list[nn.Parameter]) -> float:
    """The state for each trained parameter, in the dtype of the parameter; sharded as the parameter is."""
    own = torch.bfloat16 if job.weight_bytes == 2 else torch.float32
    held = adapters
    total = 0.0
    if job.strategy.kind == "fsdp":
        total += state_bytes(job.optimizer, own, (round(_held(job, trained)),), job.optimizer_class)
    else:
        held = trained + adapters
    shapes: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
    adapter_ids = {id(p) for p in adapters}
    for parameter in held:
        key = (tuple(parameter.shape), torch.float32 if id(parameter) in adapter_ids else own)
        shapes[key] = shapes.get(key, 0) + 1
    return total + sum(
        n * state_bytes(job.optimizer, dtype, shape, job.optimizer_class) for (shape, dtype), n in shapes.items()
    )


def state_bytes(
    options: dict[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    given_class: type[torch.optim.Optimizer] | None = None,
) -> float:
    """Return the bytes of an optimizer's state for one parameter.

    The optimizer itself is asked: it makes one step on tiny parameters. Whatever it keeps (elements, rows, columns, a
    counter) is linear in each axis, so that four small matrices, or two vectors, tell of all.
    """
    if 0 in shape:
        return 0.0
    probe = _Probe(options, dtype, given_class)
    if len(shape) == 1:
        low, high = probe.bytes((8,)), probe.bytes((16,))
        return low + (high - low) / 8 * (shape[0] - 8)
    if len(shape) == 3:  # stacked experts: as many matrices, and a counter for all
        once = 2 * probe.bytes((1, 8, 8)) - probe.bytes((2, 8, 8))
        return once + shape[0] * (state_bytes(options, dtype, shape[1:], given_class) - once)
    rows, columns = shape
    corner, right, down, both = (probe.bytes(s) for s in ((8, 8), (8, 16), (16, 8), (16, 16)))
    x, y = (rows - 8) / 8, (columns - 8) / 8
    return corner + (down - corner) * x + (right - corner) * y + (both - down - right + corner) * x * y


class _Probe:
    """Makes an optimizer's state for a parameter of a shape; each shape once."""

    _known: dict[str, int] = {}

    def __init__(self, options: dict[str, Any], dtype: torch.dtype, given_class: type | None) -> None:
        self.options = {k: v for k, v in options.items() if k not in ("name", "fused", "foreach")}
        self.cls, self.dtype = given_class or optimizer_class(options["name"]), dtype

    def bytes(self, shape: tuple[int, ...]) -> int:
        key = f"{self.cls} {self.options} {self.dtype} {shape}"
        if key not in self._known:
            parameter = nn.Parameter(torch.zeros(shape, dtype=self.dtype))
            parameter.grad = torch.zeros_like(parameter)
            optimizer = self.cls([parameter], lr=1e-3, **self.options)
            optimizer.step()
            state = optimizer.state[parameter].values()
            self._known[key] = sum(v.numel() * v.element_size() for v in state if isinstance(v, torch.Tensor))
        return self._known[key]
