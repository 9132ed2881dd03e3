"""Make meta tensors look like CUDA tensors: a model runs its GPU code without a GPU.

torch's fake tensors on "cuda" have no backward pass where torch is built without CUDA: autograd ends the process
("PyTorch is not linked with support for cuda devices", torch 2.13). Autograd supports meta tensors everywhere.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

CUDA, META = torch.device("cuda"), torch.device("meta")

# torch's lists for autocast on CUDA (ATen/autocast_mode.h), as far as language models use them
_LOWER = {
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "einsum",
    "scaled_dot_product_attention",
}  # fmt: skip
_FP32 = {"layer_norm", "rms_norm", "softmax", "log_softmax", "exp", "log", "pow", "sum", "rsqrt", "cumsum"}


class _CudaOnMeta(TorchFunctionMode):
    """Reports meta tensors as CUDA tensors, creates CUDA tensors as meta tensors, and applies autocast."""

    def __init__(self) -> None:
        super().__init__()
        self._casts: dict[Tensor, Tensor] = {}  # of trained weights, which autocast keeps until its end

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            device = func(*args)
            return CUDA if device == META else device
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].is_meta
        options = dict(kwargs or {})
        if options.get("device") == "cuda":
            options["device"] = META
        inputs = tree_map_only(torch.device, lambda d: META if d.type == "cuda" else d, (args, options))
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cuda") and "out" not in options:
            if name in _LOWER:
                inputs = tree_map_only(Tensor, self._cast_down, inputs)
            elif name in _FP32 and "dtype" not in options:  # sums and softmax return the dtype that is asked for
                inputs = tree_map_only(Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)
        return _KERNELS.get(func, func)(*inputs[0], **inputs[1])

    def _cast_down(self, tensor: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cuda")
        if not tensor.is_floating_point():
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        if tensor not in self._casts:
            self._casts[tensor] = tensor.to(dtype)
        return self._casts[tensor]


def rms_norm_on_cuda(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Apply layer norm, which has the same memory traffic and saves the same tensors."""
    return torch.native_layer_norm(x, shape, weight, None, eps or 1e-6)[0]


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Choose the kernel as CUDA does: flash for 16 bits without a mask, otherwise memory-efficient."""
    if attn_mask is None and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, q.new_zeros(()), q.new_full((), float("-inf")))
        attn_mask = attn_mask.expand(*q.shape[:3], k.size(2))
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)[0]


_KERNELS: dict[Any, Callable[..., Tensor]] = {
    F.scaled_dot_product_attention: _attention,
    F.dropout: lambda x, p, training, inplace: torch.native_dropout(x, p, training)[0],  # saves a boolean mask
    F.rms_norm: rms_norm_on_cuda,
}
"""What replaces operations whose kernels torch chooses by the device: the CUDA kernel, or one of the same cost."""


@contextmanager
def cuda_on_meta(autocast: torch.dtype | None) -> Iterator[None]:
    """Run a model on the meta device as on CUDA. ``autocast`` None disables autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        # torch.autocast turns itself off for "cuda" on a machine without it
        torch.set_autocast_enabled("cuda", autocast is not None)
        torch.set_autocast_dtype("cuda", autocast or torch.bfloat16)
        with _CudaOnMeta():
            yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
