"""Record operators on meta tensors, with their bytes and FLOPs, and the memory that they allocate."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from toolkit_plan.measure.recorder import WEIGHTS, Recorder, tensors_in

START, FORWARD, HEAD, HEAD_BACKWARD, BACKWARD, END = "start", "forward", "head", "head's backward", "backward", "end"
"""Stages of a micro-step: before the first block; blocks; head and loss; their backward passes; after those."""
CASTS = "autocast's copies of weights"
Kind = Literal["product", "attention", "fusable", "other", "accumulate", "view"]
"""Kind of an operator: matrix product; attention; element-wise or reduction, which a compiler fuses; another kernel;
addition of a weight's gradient to the sum of earlier micro-batches; no kernel."""

_NO_KERNEL = ("_unsafe_view", "is_same_size", "set_")  # apart from views and allocations
_FILLS = {"zeros_like", "full_like", "ones_like", "new_zeros", "new_full", "new_ones", "fill_", "zero_"}
_LOOKUPS, _SCATTERS = ("embedding", "index_select", "index", "gather"), ("scatter_add_", "scatter_")
_KERNELS = ("sort", "topk", "searchsorted", "embedding_dense_backward", "index_put", "cumsum", "dequantize", "_fused_",
            "_foreach", "nonzero", "bincount")  # fmt: skip


class Phase(NamedTuple):
    """Where a micro-step is: its stage (:data:`FORWARD`, ...), and the index of the running block, or None."""

    stage: str = START
    layer: int | None = None

    @property
    def is_backward(self) -> bool:
        return self.stage in (HEAD_BACKWARD, BACKWARD, END)


class Access(NamedTuple):
    """Bytes of a tensor that an operator reads or writes; ``key`` is its storage and the storage's version."""

    key: tuple[int, int]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Op:
    """One call of an operator.

    Args:
        name: The operator's name in torch.
        kind: See :data:`Kind`.
        layer: Index of the traced block; None for the embedding, the head and the optimizer.
        is_backward: Whether the call is in the backward pass.
        reads, writes: Accessed tensors on the device.
        flops: FLOPs of products and attention.
        itemsize: Bytes per element of a product's inputs.
        is_aligned: Whether the rows of a product's inputs and output begin at multiples of 16 bytes.
        head_size: Head size of attention.
    """

    name: str
    kind: Kind
    layer: int | None
    is_backward: bool
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    flops: float = 0.0
    itemsize: int = 2
    is_aligned: bool = True
    head_size: int = 0

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in (*self.reads, *self.writes))


class OperatorRecorder(Recorder):
    """Also appends operators on meta tensors to ``ops``. Its phase is a :class:`Phase`.

    Args:
        gradients: Weight gradients that the backward pass accumulates into.
        quantized: 4-bit weights, which have placeholders of 16 bits.
        matrices: Weights whose copies in another dtype are of kind :data:`CASTS`.
    """

    def __init__(
        self, gradients: Iterable[Tensor] = (), quantized: Iterable[Tensor] = (), matrices: Iterable[Tensor] = ()
    ) -> None:
        super().__init__(Phase())
        self.ops: list[Op] = []
        self._versions: Counter[int] = Counter()
        self._gradients, self._quantized, self._matrices = (
            {self._storage(t) for t in tensors} for tensors in (gradients, quantized, matrices)
        )

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.split("::")[1]
        if name == "_to_copy":
            source = self._storage(args[0])
            if source in self._quantized:
                self.track(out, WEIGHTS)  # dequantized again for each matmul
            elif source in self._matrices:
                self.track(out, CASTS)
        inputs, outputs = ([t for t in tensors_in(values) if t.is_meta] for values in ((args, kwargs), out))
        if not inputs and not outputs:
            return
        if func.is_view or "empty" in name or name in _NO_KERNEL:
            self._append(name, "view", [], [])
            return
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        flops = _flops(func, name, args, kwargs, arguments, out)
        for weight in inputs if flops else ():
            if self._storage(weight) in self._quantized:
                self._dequantize(weight)
        reads = [] if name in _FILLS else [self._access(t) for t in inputs]
        # optimizers write gradients under a gradient scaler only
        written = [arguments.get(a.name) for a in func._schema.arguments if a.is_write and a.name != "grads"]
        mutated = {self._storage(t) for t in tensors_in(written)}
        self._versions.update(mutated)
        writes = [self._access(t) for t in [*outputs, *(t for t in inputs if self._storage(t) in mutated)]]
        if name in _LOOKUPS:  # reads as many elements as it writes
            reads = _at_most(reads, sum(a.bytes for a in {*writes}))
        elif name in _SCATTERS:  # reads and writes as many elements as the smallest input has
            smallest = min(a.bytes for a in reads)
            reads, writes = _at_most(reads, smallest), _at_most(writes, smallest)
        kind: Kind = "other" if any(part in name for part in _KERNELS) else "fusable"
        if "attention" in name:
            kind = "attention"
        elif flops:
            kind = "product"
        elif name == "add_" and mutated & self._gradients:
            kind = "accumulate"
        itemsize = min((t.dtype.itemsize for t in inputs if t.is_floating_point()), default=4)
        is_aligned = all(map(_is_aligned, (*inputs, *outputs)))
        head_size = inputs[0].size(-1) if kind == "attention" else 0
        self._append(name, kind, reads, writes, flops, itemsize, is_aligned, head_size)

    def _append(self, name: str, kind: Kind, reads: list[Access], writes: list[Access], *costs: Any) -> None:
        """Append an operator. It accesses a tensor once, even if it is several of its arguments."""
        where = self.phase.layer, self.phase.is_backward
        self.ops.append(Op(name, kind, *where, tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)), *costs))

    def _dequantize(self, weight: Tensor) -> None:
        """Record the kernel that dequantizes a 4-bit weight, with its scales 4.5 bits, to 16 bits for a matmul."""
        key, n = (self._storage(weight), 0), weight.numel()
        self._append("dequantize_4bit", "other", [Access(key, -1, n * 9 // 16)], [Access(key, 0, 2 * n)])

    def _storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, unlike its address never reused."""
        return self.track(tensor).number

    def _access(self, tensor: Tensor) -> Access:
        key = self._storage(tensor)
        sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        size = tensor.element_size() * math.prod(sizes)  # expanded dimensions are read once
        return Access((key, self._versions[key]), int(tensor.storage_offset()), size)


def _at_most(accesses: list[Access], size: int) -> list[Access]:
    return [a._replace(bytes=min(a.bytes, size)) for a in accesses]


def _is_aligned(tensor: Tensor) -> bool:
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 < stride)
    return all(stride * tensor.element_size() % 16 == 0 for stride in strides)


def _flops(func: Any, name: str, args: Any, kwargs: Any, arguments: dict[str, Any], out: Any) -> float:
    if name.startswith("grouped_"):  # products of experts, see models/moe.py
        return 2.0 * arguments["x"].numel() * out.size(-1)
    if "attention" in name:
        return _attention_flops(name, arguments)
    if name.startswith("gated_delta_rule"):  # products with the state and in chunks, see models/gated_delta.py
        (_, _, _, keys), values, size = arguments["k"].shape, arguments["v"].size(-1), arguments["chunk_size"]
        forward = arguments["v"].numel() // values * (6.0 * keys * values + 4 * size * (keys + values))
        return 2.5 * forward if name.endswith("backward") else forward
    formula = flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def _attention_flops(name: str, arguments: dict[str, Any]) -> float:
    """Return the FLOPs of attention: torch 2.11 does not count query groups, and no version causal masks and windows.

    The backward pass recomputes the scores: three products with the key width, two with the value width. Document
    bounds of packed rows have no values on the meta device: each row counts as one document.
    """
    if "window" in arguments:  # the operator in models/attention_kernels.py, on (B, T, heads, width)
        (B, T, heads, width), before = arguments["q"].shape, arguments["window"]
        keys = T if before < 0 else min(before + 1, T)  # -1 for all
        values, pairs = width, B * heads * (T * keys - keys**2 / 2)
    else:  # torch's, on (B, heads, T, width)
        (B, heads, T, width), values = arguments["query"].shape, arguments["value"].size(-1)
        pairs = B * heads * T * arguments["key"].size(2) * (0.5 if arguments.get("is_causal") else 1.0)
    return 2 * pairs * (3 * width + 2 * values if name.endswith("backward") else width + values)
