"""A module's forward compiled by Thunder, with the parameters passed at each call.

``thunder.jit`` binds a module's current parameters. Strategies replace parameters later (FSDP by views of gathered
weights), and equal blocks differ only in their parameters. A kernel therefore traces a copy of the module on the meta
device, and each call passes the tensors to compute with. Weight names and checkpoints do not change, and equal blocks
share a kernel.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from toolkit.errors import UserError, one_line
from toolkit.models import attention
from toolkit.models.block import Block
from toolkit.models.masks import AttentionMask
from toolkit.models.rope import RotaryEmbedding
from toolkit_thunder.versions import load_thunder


class Slot(NamedTuple):
    """A module attribute that holds a parameter."""

    name: str
    owner: nn.Module
    attribute: str

    def get(self) -> Tensor:
        """Return the parameter, or the tensor that a strategy has put in its place."""
        return getattr(self.owner, self.attribute)


def slots_of(module: nn.Module) -> list[Slot]:
    """Return the slots of all parameters. A tied parameter has several slots."""
    return [
        Slot(f"{path}.{name}".lstrip("."), owner, name)
        for path, owner in module.named_modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


class Kernel:
    """The compiled forward of a module and of other modules with the same structure.

    Args:
        module: The module, which is copied to the meta device.
        name: Name of the module in the trace. Thunder assigns parameters to buckets by name, up to the first number
            (BLOCK) or without the last component (LAYER).
        executors: Names of Thunder executors; None for Thunder's defaults.
        make_transforms: Creates the transforms (Thunder's FSDP or DDP) for one compiled function.

    Raises:
        UserError: an executor is unknown, or the module has parts that Thunder cannot compile.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        executors: Sequence[str] | None,
        make_transforms: Callable[[], list[Any]] = list,
    ) -> None:
        _require_supported(module)
        self._mold, self._name = _without_values(module), name
        self._executors, self._make_transforms = find_executors(executors), make_transforms
        self._jitted: dict[Hashable, Any] = {}

    def __call__(self, slots: list[Slot], values: list[Tensor], training: bool, *args: Any, **options: Any) -> Any:
        """Run the forward.

        Args:
            slots: The module's parameters, which define the shapes in the trace.
            values: The tensors to compute with: the parameters, or this rank's shards.
            training: The module's mode.
            args, options: Arguments of the module's forward.

        Raises:
            UserError: Thunder cannot compile the forward.
        """
        expected = tuple((slot.get().shape, v.dtype, v.requires_grad) for slot, v in zip(slots, values, strict=True))
        key = (training, values[0].device, expected)
        if is_new := key not in self._jitted:
            self._jitted[key] = self._compile(slots, *key)
        jitted = self._jitted[key]
        for slot, value in zip(slots, values, strict=True):
            jitted._overrides_parameters[f"{self._name}.{slot.name}"] = value
        if not is_new:
            return jitted(*args, **options)
        try:
            return jitted(*args, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            del self._jitted[key]
            name = getattr(type(self._mold), "__name__", "module")
            raise UserError(
                f"Thunder cannot compile {name}: {type(error).__name__}: {one_line(error):.300}; use --compiler torch"
            ) from error

    def _compile(self, slots: list[Slot], training: bool, device: torch.device, expected: Any) -> Any:
        memo: dict[int, Any] = {}
        for old, (shape, dtype, requires_grad) in zip(slots_of(self._mold), expected, strict=True):
            new = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=requires_grad)
            new._thunder_device = device  # type: ignore[attr-defined]  # Thunder assumes that the values are here
            memo.setdefault(id(old.get()), new)
        module = copy.deepcopy(self._mold, memo).train(training)
        traced = (_TracedBlock if isinstance(module, Block) else _Traced)(_without_hooks(module), self._name)
        transforms = self._make_transforms()
        jitted = load_thunder().jit(traced, executors=self._executors, transforms=transforms)
        for transform in transforms:
            if (replicated := getattr(transform, "replicated_params", None)) is not None:  # DDP, which sees no device
                replicated |= {name: (shape, device) for name, (shape, _) in replicated.items()}
        return jitted


class _Traced(nn.Module):
    """Wrapper that gives a module a name in the trace."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, module)

    def forward(self, *args: Any, **options: Any) -> Any:
        return getattr(self, self.name).forward(*args, **options)


class _TracedBlock(_Traced):
    """Wrapper of a toolkit block that takes tensors and numbers, see :func:`plain_arguments`."""

    def forward(  # type: ignore[override]
        self, x: Tensor, n_keys: int, mask: Tensor | None, is_causal: bool, *rope_values: Tensor | None
    ) -> Tensor:
        rope: Any = _Rope(rope_values) if rope_values else None
        return getattr(self, self.name).forward(x, AttentionMask(n_keys, mask, is_causal), rope)


class _Rope:
    """The values of a RotaryEmbedding, without its ``__slots__``, which Thunder cannot trace."""

    def __init__(self, values: tuple[Tensor | None, ...]) -> None:
        for name, value in zip(RotaryEmbedding.__slots__, values):  # noqa: B905  # Thunder cannot trace strict=True
            setattr(self, name, value)

    def apply(self, x: Tensor) -> Tensor:
        return RotaryEmbedding.apply(self, x)  # type: ignore[arg-type]


def plain_arguments(
    x: Tensor, attn_mask: AttentionMask, rope: RotaryEmbedding | None, *others: Any, **options: Any
) -> tuple[Any, ...] | None:
    """Return the arguments of a toolkit block as tensors and numbers.

    Returns None for arguments that Thunder does not support: a KV cache (in samples during training) and others.
    """
    if any(other is not None for other in (*others, *options.values())):
        return None
    return (x, *attn_mask[:3], *(() if rope is None else (getattr(rope, name) for name in rope.__slots__)))


def structure_of(block: nn.Module) -> Hashable:
    """Return a key that is equal for toolkit blocks that can share a kernel."""
    parts = []
    for name, part in block.named_modules():
        # two attributes by which the model chooses a block's arguments
        plain = {k: v for k, v in vars(part).items() if isinstance(v, _PLAIN) and k not in ("window", "rope_index")}
        parts.append((name, type(part), repr(sorted(plain.items()))))
    return (*parts, *((slot.name, slot.get().shape) for slot in slots_of(block)))


_PLAIN = (bool, int, float, str, type(None))


@functools.cache
def _adapter() -> Any:
    """Return the executor that replaces toolkit's fused attention, which Thunder cannot trace."""
    load_thunder()
    from thunder.extend import OperatorExecutor

    executor = OperatorExecutor("toolkit")
    executor._lookasides[attention.fused_attention] = _attention
    return executor


def _attention(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: float) -> Any:
    """toolkit.models.attention.fused_attention in Thunder operations, which lack ``enable_gqa``."""
    import thunder.torch as operations

    if (repeats := q.shape[1] // k.shape[1]) > 1:
        k, v = (operations.repeat_interleave(t, repeats, 1) for t in (k, v))
    return operations.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale)


def find_executors(names: Sequence[str] | None) -> tuple[Any, ...]:
    """Return toolkit's adapter and the named Thunder executors, or Thunder's default executors.

    Raises:
        UserError: an executor is unknown, or not available here.
    """
    thunder = load_thunder()
    executors_by_name = {executor.name: executor for executor in thunder.get_all_executors()}
    for name in names or ():
        if name not in executors_by_name:
            raise UserError(
                f"--thunder.executors {name}: is not available; choose from {', '.join(sorted(executors_by_name))}"
            )
    selected = thunder.get_default_executors() if names is None else [executors_by_name[name] for name in names]
    return (_adapter(), *selected)


def _require_supported(module: nn.Module) -> None:
    """Raise UserError if Thunder cannot compile the module."""
    for part in module.modules():
        if isinstance(part, Block) and part.has_experts:
            raise UserError("--compiler thunder: cannot compile expert routing; use --compiler torch")
        if part is not module and (part._forward_hooks or part._forward_pre_hooks):
            raise UserError(
                f"--compiler thunder: {type(part).__name__} in a block has hooks, which would not run; remove them"
            )


def _without_values(module: nn.Module) -> nn.Module:
    """Return a copy with parameters on the meta device and copied buffers."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, memo)


def _without_hooks(module: nn.Module) -> nn.Module:
    """Make submodules call ``forward`` directly, because tracing ``nn.Module.__call__`` takes most of Thunder's time.

    Measured for a block of a tiny Llama: 2.5 instead of 6.6 seconds of one CPU core.
    """
    for part in module.modules():
        cls = type(part)
        part.__class__ = type(cls.__name__, (cls,), {"__call__": _call_forward})
    return module


def _call_forward(self: Any, *args: Any, **options: Any) -> Any:
    return self.forward(*args, **options)
