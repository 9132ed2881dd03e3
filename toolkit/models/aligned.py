"""Matmuls of odd sizes: cuBLAS has only slow kernels for 16-bit rows that are not multiples of 16 bytes.

On CUDA, such a size is padded with zeros, and the padding of the result is ignored. Parameters, gradients and files
keep their sizes.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.models.mixed_mm import matmul_dtype


def needs_alignment(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether matmuls need aligned rows to be fast."""
    return device.type == "cuda" and dtype.itemsize == 2


def aligned_size(size: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the padded size of a dimension in a matmul: a multiple of 64, or of 8 for small ones."""
    if size % 8 == 0 or not needs_alignment(device, dtype):
        return size
    multiple = 64 if size > 64 else 8
    return -(-size // multiple) * multiple


def missing_width(x: Tensor) -> int:
    """Return how many columns x, (..., width), lacks to a multiple of 8, which fused attention needs."""
    return -x.size(-1) % 8 if needs_alignment(x.device, matmul_dtype(x)) else 0


def aligned_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (n, k) in ``dtype`` with zero rows up to the aligned size; a view if the storage has them."""
    n, k = matrix.shape
    size = aligned_size(n, matrix.device, dtype)
    if size == n:
        return matrix.to(dtype)
    has_rows = matrix.dtype == dtype and matrix.untyped_storage().size() == size * k * dtype.itemsize
    if has_rows and matrix.is_contiguous() and matrix.storage_offset() == 0:
        return matrix.as_strided((size, k), (k, 1))
    padded = matrix.new_empty(size, k, dtype=dtype)
    padded[:n] = matrix
    padded[n:] = 0
    return padded


class AlignedLinear(nn.Linear):
    """A linear layer with any number of outputs."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.padded(x)[..., : self.weight.size(0)]

    def padded(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., aligned size of out)."""
        weight = self.weight
        dtype, n = matmul_dtype(weight), weight.size(0)
        size = aligned_size(n, x.device, dtype)
        if size == n:
            return super().forward(x)
        bias = None if self.bias is None else F.pad(self.bias, (0, size - n))
        return F.linear(x, aligned_rows(weight, dtype), bias)
