"""Record the storages that operators allocate and free, on tensors without data."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import KeyedRef

import torch
from torch import Tensor

from toolkit.private_torch import TorchDispatchMode, tree_leaves

WEIGHTS, ACTIVATIONS = "weights", "activations"


@dataclass
class Storage:
    """A storage, live or freed. What it is for may be known only later.

    Args:
        made_in: The phase in which it was allocated.
        kind: What it is for.
        size: Current bytes; 0 if it is freed.
        number: Identifies it.
    """

    made_in: Any
    kind: str = ACTIVATIONS
    size: int = 0
    number: int = field(default_factory=count().__next__)


class Recorder(TorchDispatchMode):
    """Records allocations and frees of storages, in their order, with the phase of the step."""

    def __init__(self, phase: Any) -> None:
        super().__init__()
        self._phase = phase
        self._changes: list[tuple[Storage, int, Any]] = []
        self._live: dict[int, tuple[Storage, Any]] = {}  # with the reference that reports the end of the storage
        # Python discards what a weak reference's callback raises, also Ctrl-C's KeyboardInterrupt. So the callback is
        # append, which runs no Python code, and the frees are recorded later.
        self._freed: deque[Any] = deque()

    @property
    def phase(self) -> Any:
        """The current phase of the step."""
        return self._phase

    @phase.setter
    def phase(self, phase: Any) -> None:
        self._record_frees()
        self._phase = phase

    @property
    def changes(self) -> list[tuple[Storage, int, Any]]:
        """Storages, the change of their bytes, and the phase in which they changed."""
        self._record_frees()
        return self._changes

    def find(self, storage: torch.UntypedStorage) -> Storage | None:
        """Return the record of a storage; None if it is not recorded."""
        self._record_frees()
        return self._live.get(storage._cdata, (None,))[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_item = func is torch.ops.aten._local_scalar_dense.default
        if is_item and getattr(args[0], "fake_mode", args[0].is_meta):  # there is no data
            return True
        if any(map(is_wrapper, types)):
            return NotImplemented  # continues with the operators on its parts
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # autograd asks fake tensors for their device more often than it runs operators
            self.track_all(tensors_in(out))
            self.record(func, args, kwargs or {}, out)
        return out

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record more of a call than the storages of its results."""

    def track(self, tensor: Tensor, kind: str = "") -> Storage:
        """Record a tensor's storage, and its kind if known."""
        storage = tensor.untyped_storage()
        record = self.find(storage)
        if record is None:
            record, key = Storage(self.phase), storage._cdata
            self._live[key] = record, KeyedRef(storage, self._freed.append, key)
            self._resized(record, storage.nbytes())
        if kind:
            record.kind = kind
        return record

    def track_all(self, tensors: Iterable[Tensor], kind: str = "") -> None:
        for tensor in tensors:
            self.track(tensor, kind)

    @contextmanager
    def resizes(self) -> Iterator[None]:
        """Also record resized storages: FSDP frees gathered weights in this way."""
        resize = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (record := self.find(storage)) is not None:
                self._resized(record, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def _record_frees(self) -> None:
        while self._freed:
            record, _ = self._live.pop(self._freed.popleft().key)
            self._resized(record, 0)

    def _resized(self, record: Storage, size: int) -> None:
        if change := size - record.size:
            record.size = size
            self._changes.append((record, change, self._phase))


def is_wrapper(kind: type) -> bool:
    """Whether tensors of a class only hold others, as a DTensor or an fp8 tensor; their own storage has no memory."""
    return hasattr(kind, "__tensor_flatten__")


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors with memory in a nested structure."""
    leaves = (value for value in tree_leaves(values) if isinstance(value, Tensor))
    return [tensor for tensor in leaves if not is_wrapper(type(tensor))]
