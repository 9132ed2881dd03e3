"""Copy training state to host memory, so that a checkpoint can be written while training continues."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.private_torch import local_shard


class HostCopies:
    """Host-memory copies of tensors. Buffers are reused for the next checkpoint.

    CUDA tensors are copied to pinned memory while training continues.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: dict[Any, Tensor] = {}  # tied weights are one tensor in the copy, too
        self._live: set[int] = set()
        self._copied_event: torch.cuda.Event | None = None

    def begin(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Begin a new checkpoint. It overwrites the copies of the previous one."""
        self._copied = {}
        trained = [*module.parameters(), *module.buffers(), *optimizer.state.values(), *optimizer.param_groups]
        self._live = {local_shard(tensor).untyped_storage().data_ptr() for _, tensor in named_tensors(trained)}

    def copy(self, value: Any, name: str) -> Any:
        """Copy all tensors in nested containers. CPU tensors that training does not use are returned uncopied.

        ``name`` identifies the buffer that the next checkpoint reuses.
        """
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), name)
        if isinstance(value, dict):
            return {key: self.copy(inner, f"{name}/{key}") for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.copy(inner, f"{name}/{i}") for i, inner in enumerate(value))
        return value

    def _copy_tensor(self, tensor: Tensor, name: str) -> Tensor:
        if tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() not in self._live:
            return tensor
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._copied:
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (tensor.shape, tensor.dtype):
                buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._buffers[name] = buffer
            self._copied[key] = buffer.copy_(tensor, non_blocking=tensor.is_cuda)
        return self._copied[key]

    def end(self) -> None:
        """Record a CUDA event after the last copy, for :meth:`wait`."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._copied_event = torch.cuda.Event()
            self._copied_event.record()

    def wait(self) -> None:
        """Wait until all copies are complete. Can be called from any thread."""
        if self._copied_event is not None:
            self._copied_event.synchronize()


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) for each tensor in nested containers."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_tensors(inner, f"{name} {key}".strip())
