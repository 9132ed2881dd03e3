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
from toolkit.models.loss import chunk_rows
from toolkit.training.optimizer import optimizer_class
from toolkit.training.throughput import matmul_parameters

FP32 = 4
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
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("transformer.h.")]
    return {f"{name}.weight": model.get_parameter(f"{name}.weight") for name in linears}


def _cast_bytes(job: Job, model: GPT, quantized: dict[str, nn.Parameter]) -> int:
    """Autocast's copies of the blocks' weights and biases; the head's are the loss's. FSDP gathers in 16 bits."""
    if not job.is_mixed or job.strategy.kind == "fsdp":
        return 0
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
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


# ---- activations


def activation_bytes(job: Job) -> float:
    """What autograd keeps of a forward pass: Korthikanti et al. 2022 (arXiv 2205.05198) count so, here for our Block.

    Attention is ``scaled_dot_product_attention``: no (T, T) matrix, but where no fused kernel takes the inputs.
    """
    config, n = job.config, job.tokens
    blocks = config.n_layer * n * (_norms(job) + _attention(job) + _mlp(job))
    last_norm = n * _norm(job)
    rotation = 0 if config.position_embedding == "learned" else 2 * FP32 * job.seq_length * config.rope_n_elem
    mask = n * job.seq_length if job.packed else 0
    return blocks + last_norm + rotation + mask + 8 * n


def _norm(job: Job) -> int:
    """One norm, per token: its input and its statistics.

    On the CPU torch composes RMSNorm of smaller steps, which keep what goes between them in fp32.
    """
    config, residual = job.config, job.weight_bytes
    if job.device == "cpu" and config.norm_class_name == "RMSNorm":
        return config.n_embd * FP32 * (1 + (job.lora is None)) + FP32
    return config.n_embd * residual + (FP32 if config.norm_class_name == "RMSNorm" else 2 * FP32)


def _norms(job: Job) -> int:
    """The norms of a block and their outputs, as inputs of linear layers, per token.

    Autocast rounds an fp32 input anew for each layer that keeps it.
    """
    config = job.config
    count = 1 if config.shared_attention_norm else 2
    kept = count * _norm(job)
    if config.parallel_residual and count == 2:
        kept -= config.n_embd * job.weight_bytes  # both read the same
    gates = 2 if config.mlp_class_name == "LLaMAMLP" else 1
    readers = [int(_keeps_input(job, _QKV)), gates * _keeps_input(job, _MLP)]
    if config.shared_attention_norm:
        readers = [sum(readers)]
    copies = sum(readers) if job.is_mixed else sum(min(1, n) for n in readers)
    return kept + copies * config.n_embd * job.compute_bytes


def _attention(job: Job) -> float:
    """Queries, keys, values, the output and its log-sum-exps, per token.

    The values are a part of the fused projection's output, which therefore stays whole; rotated queries and keys are
    new. A mask is turned into numbers, layer by layer.
    """
    config, c = job.config, job.compute_bytes
    heads, groups = config.n_head * config.head_size, config.n_query_groups * config.head_size
    kept = c * (heads + 2 * groups) + c * heads + FP32 * config.n_head
    if config.position_embedding == "rope":
        kept += c * (heads + groups)
    if job.packed:
        kept += c * job.seq_length
    if job.device == "cuda" and config.n_query_groups != config.n_head and (c == FP32 or job.packed):
        # CUDA's fused kernels for fp32 or with a mask take no grouped queries, and the plain way keeps the
        # probabilities, in fp32 and twice, and the keys and values of all heads
        kept += 2 * FP32 * config.n_head * job.seq_length + 2 * FP32 * heads
    kept += _adapter(job, _QKV, config.n_embd, heads + 2 * groups, job.weight_bytes)
    return kept + _adapter(job, _PROJECTION, heads, config.n_embd, c)


def _mlp(job: Job) -> float:
    """Per token: what the activation function and the gate read, and the last layer's input."""
    config, c = job.config, job.compute_bytes
    inner = config.intermediate_size
    gates = 2 if config.mlp_class_name == "LLaMAMLP" else 1
    kept = c * inner * ((3 if gates == 2 else 1) + _keeps_input(job, _MLP))
    first = gates * _adapter(job, _MLP, config.n_embd, inner, job.weight_bytes)
    return kept + first + _adapter(job, _MLP, inner, config.n_embd, c)


_QKV, _PROJECTION, _MLP = ("query", "key", "value"), ("projection",), ("mlp",)  # the adapters of each linear layer


def _keeps_input(job: Job, parts: tuple[str, ...]) -> bool:
    """Whether a linear layer's input is kept: for the gradient of its weight, or of its adapters."""
    if job.lora is None:
        return True
    return not job.lora.dropout and any(getattr(job.lora, part) for part in parts)


def _adapter(job: Job, parts: tuple[str, ...], inputs: int, outputs: int, input_bytes: int) -> float:
    """What the adapters of one layer keep per token.

    That is the low-rank values; with dropout what is left of the inputs, and the mask, which on the CPU is of the
    inputs' dtype (``input_bytes``); with DoRA what its magnitudes multiply.
    """
    chosen = 0 if job.lora is None else sum(getattr(job.lora, part) for part in parts)
    if not chosen:
        return 0
    c = job.compute_bytes
    dropped = inputs * (c + (input_bytes if job.device == "cpu" else 1)) if job.lora.dropout else 0
    return job.lora.r * chosen * c + dropped + (outputs * c if job.lora.dora else 0)


def logits_bytes(job: Job) -> float:
    """One chunk of logits with its gradient, rounded where products are in 16 bits, and the gradients of the loss.

    See models/loss.py: the head's gradient waits in fp32 between forward and backward, a second one in 16 bits is
    added to it; the input is rounded, masked and gets its gradient.
    """
    config, c, n = job.config, job.compute_bytes, job.tokens
    vocabulary, head = config.padded_vocab_size, config.padded_vocab_size * config.n_embd
    rows = min(chunk_rows(vocabulary, torch.device(job.device)), n)
    chunk = rows * vocabulary * (FP32 + (c if c != FP32 else 0))
    trained = head * (FP32 + (c if c != FP32 else 0)) if job.lora is None else 0
    rounded = head * c if job.is_mixed else 0
    return chunk + trained + rounded + n * config.n_embd * (2 * c + job.weight_bytes)
