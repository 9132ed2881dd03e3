"""Record operators on meta tensors, with their bytes and FLOPs, and the memory that they allocate."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from toolkit.measure.recorder import WEIGHTS, Recorder, tensors_in

FORWARD, HEAD, BACKWARD = "forward", "head", "backward"
CASTS = "autocast's copies of weights"
Kind = Literal["product", "attention", "fusable", "other", "accumulate", "view"]
"""Kind of an operator: matrix product; attention; element-wise or reduction, which a compiler fuses; another kernel;
addition of a weight's gradient to the sum of earlier micro-batches; no kernel."""

_NO_KERNEL = ("_unsafe_view", "is_same_size", "set_")  # apart from views and allocations
_FILLS = {"zeros", "zeros_like", "full", "full_like", "fill_", "zero_", "ones", "arange", "new_zeros", "new_full",
          "new_ones", "ones_like", "scalar_tensor"}  # fmt: skip
_KERNELS = ("sort", "topk", "searchsorted", "embedding_dense_backward", "index_put", "cumsum", "dequantize", "_fused_",
            "_foreach", "nonzero", "bincount")  # fmt: skip


class Phase(NamedTuple):
    """Where a micro-step is: its stage (:data:`FORWARD`, ...), and the index of the running block, or None."""

    stage: str = FORWARD
    layer: int | None = None


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
        launches: Number of kernels.
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
    launches: int = 1

    @property
    def bytes(self) -> int:
        return sum(access.bytes for access in (*self.reads, *self.writes))


class OperatorRecorder(Recorder):
    """Also appends operators on meta tensors to ``ops``. Its phase is a :class:`Phase`.

    Args:
        gradients: Weight gradients that the backward pass accumulates into.
        quantized: 4-bit weights, which have placeholders of 16 bits, and their bytes.
        matrices: Weights whose copies in another dtype are of kind :data:`CASTS`.
    """

    def __init__(
        self,
        gradients: Iterable[Tensor] = (),
        quantized: Iterable[tuple[Tensor, int]] = (),
        matrices: Iterable[Tensor] = (),
    ) -> None:
        super().__init__(Phase())
        self.ops: list[Op] = []
        self._versions: Counter[int] = Counter()
        self._gradients = {self._storage(g) for g in gradients}
        self._quantized = {self._storage(weight): size for weight, size in quantized}
        self._matrices = {self._storage(m) for m in matrices}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":  # ``.item()`` in the model
            return True
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # continues with the operators on the parts of an fp8 tensor
        out = func(*args, **kwargs)
        outputs = tensors_in(out)
        for tensor in outputs:
            self.track(tensor)
        if name == "_to_copy":
            source = self._storage(args[0])
            if source in self._quantized:
                self.track(out, WEIGHTS)  # dequantized again for each matmul
            elif source in self._matrices:
                self.track(out, CASTS)
        self._record(func, name, args, kwargs, [t for t in outputs if t.is_meta], out)
        return out

    def _record(
        self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], outputs: list[Tensor], out: Any
    ) -> None:
        inputs = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and t.is_meta]
        if not inputs and not outputs:
            return
        where = self.phase.layer, self.phase.stage == BACKWARD
        if func.is_view or "empty" in name or name in _NO_KERNEL:
            self.ops.append(Op(name, "view", *where, launches=0))
            return
        flops = _flops(func, name, args, kwargs, out)
        for tensor in inputs if flops else ():
            self._dequantize(tensor)
        reads = tuple(dict.fromkeys(self._access(t) for t in inputs))
        mutated = {self._storage(t) for t in _mutated(func, args, kwargs)}
        self._versions.update(mutated)
        results = [*outputs, *(t for t in inputs if self._storage(t) in mutated)]
        writes = tuple(dict.fromkeys(self._access(t) for t in results))
        reads, writes = _actual_accesses(name, reads, writes)
        kind = self._kind(name, flops, mutated)
        floats = [t.dtype.itemsize for t in inputs if t.is_floating_point()]
        head_size = inputs[0].size(-1) if kind == "attention" and inputs[0].ndim else 0
        itemsize, is_aligned = min(floats, default=4), all(map(_is_aligned, (*inputs, *outputs)))
        self.ops.append(Op(name, kind, *where, reads, writes, flops, itemsize, is_aligned, head_size))

    def _storage(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, unlike its address never reused."""
        return self.track(tensor).number

    def _access(self, tensor: Tensor) -> Access:
        key = self._storage(tensor)
        sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        size = tensor.element_size() * math.prod(sizes)  # expanded dimensions are read once
        return Access((key, self._versions[key]), int(tensor.storage_offset()), size)

    def _kind(self, name: str, flops: float, mutated: set[int]) -> Kind:
        if "attention" in name or "attn" in name:
            return "attention"
        if flops:
            return "product"
        if name == "add_" and mutated & self._gradients:
            return "accumulate"
        return "other" if any(part in name for part in _KERNELS) else "fusable"

    def _dequantize(self, tensor: Tensor) -> None:
        """Record the kernel that dequantizes a 4-bit weight to 16 bits for a matmul."""
        packed = self._quantized.get(self._storage(tensor))
        if packed is not None:
            key = (self._storage(tensor), 0)
            reads, writes = (Access(key, -1, packed),), (Access(key, 0, 2 * tensor.numel()),)
            where = self.phase.layer, self.phase.stage == BACKWARD
            self.ops.append(Op("dequantize_4bit", "other", *where, reads, writes))


def _is_aligned(tensor: Tensor) -> bool:
    strides = (stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 < stride)
    return all(stride * tensor.element_size() % 16 == 0 for stride in strides)


def _mutated(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes in place."""
    written: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if is_write and argument.name != "grads":  # optimizers write them under a gradient scaler only
            written.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in tree_iter(written) if isinstance(t, Tensor)]


def _flops(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> float:
    if name == "grouped_product":
        return 2.0 * args[0].numel() * out.size(-1)
    if name == "grouped_outer_product":
        return 2.0 * args[0].numel() * args[1].size(-1)
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if name in ("flash_attention", "flash_attention_backward"):
        return _flash_flops(name, arguments)
    if "scaled_dot_product" in name:
        return _attention_flops(name, arguments)
    formula = flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0


def _attention_flops(name: str, arguments: dict[str, Any]) -> float:
    """Return the FLOPs of torch's attention on queries (B, heads, T, width). torch 2.11 does not count query groups.

    The backward pass recomputes the scores: three products with the key width, two with the value width.
    """
    (B, heads, T, width), values = arguments["query"].shape, arguments["value"].size(-1)
    pairs = B * heads * T * arguments["key"].size(2) * (0.5 if arguments.get("is_causal", False) else 1.0)
    return 2 * pairs * (3 * width + 2 * values if name.endswith("backward") else width + values)


def _flash_flops(name: str, arguments: dict[str, Any]) -> float:
    """Return the FLOPs of the operator in models/attention_kernels.py on queries (B, T, heads, width).

    Document bounds of packed rows have no values on the meta device: each row counts as one document.
    """
    B, T, heads, width = arguments["q"].shape
    before = arguments["window"]  # keys before the query, -1 for all
    keys = T if before < 0 else min(before + 1, T)
    pairs = B * heads * (T * keys - keys**2 / 2)
    return 4 * pairs * width * (2.5 if name.endswith("backward") else 1.0)


def _actual_accesses(
    name: str, reads: tuple[Access, ...], writes: tuple[Access, ...]
) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """Return the accesses of operators that do not read or write all of their arguments."""
    if name in _FILLS:
        return (), writes
    if name in ("embedding", "index_select", "index", "gather"):  # as many elements as it writes
        return _at_most(reads, sum(w.bytes for w in writes)), writes
    if name in ("scatter_add_", "scatter_"):
        written = min((a.bytes for a in reads), default=0)
        return _at_most(reads, written), _at_most(writes, written)
    return reads, writes


def _at_most(accesses: tuple[Access, ...], size: int) -> tuple[Access, ...]:
    return tuple(a._replace(bytes=min(a.bytes, size)) for a in accesses)
