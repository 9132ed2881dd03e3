"""Cross-entropy and its gradient in one Triton kernel that reads the logits twice. To import this, Triton is needed.

A program computes one row. Its first pass over the columns keeps a maximum and a sum of exponentials per lane (online
softmax, arXiv 1805.02867) and combines them at the end. Its second pass computes the gradient. Per logit, the kernel
reads 2 x 4 bytes and writes a gradient of 2; torch.compile's kernel reads 3 x 4 bytes. Rows that are ignored are not
read. No two programs write to the same address, so results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 4096, 16  # per pass of the loop; 16 warps of 64 threads, as on AMD, are the maximum


@triton.jit
def _cap(logits, bias, columns, is_read, softcap: tl.constexpr):
    """Read logits, add the bias and cap them. Return them, -inf where not read, and the derivative of the cap."""
    z = tl.load(logits + columns, mask=is_read, other=float("-inf"))
    if bias is not None:
        z += tl.load(bias + columns, mask=is_read, other=0.0).to(tl.float32)
    slope = 1.0
    if softcap is not None:
        tanh = 2 * tl.sigmoid(2 / softcap * z) - 1
        z, slope = softcap * tanh, 1 - tanh * tanh
    return z, slope


@triton.jit
def _kernel(
    logits,
    targets,
    ignored,
    bias,
    losses,
    grad,
    stride: tl.constexpr,
    size: tl.constexpr,
    n_tokens: tl.constexpr,  # columns without padding
    softcap: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows times columns may exceed 32 bits
    logits += row * stride
    grad += row * size
    n_read, n_used = size, n_tokens
    if ignored is not None:  # an ignored row has no columns
        is_ignored = tl.load(ignored + row)
        n_read, n_used = tl.where(is_ignored, 0, size), tl.where(is_ignored, 0, n_tokens)
    target = tl.load(targets + row)
    is_valid = (target >= 0) & (target < n_used)
    lanes = tl.arange(0, block)
    largest = tl.full([block], -3.4028234663852886e38, tl.float32)  # not -inf: -inf - -inf is NaN
    total = tl.zeros([block], tl.float32)
    for start in range(0, size, block):
        columns = start + lanes
        z, _ = _cap(logits, bias, columns, columns < n_read, softcap)
        z = tl.where(columns < n_used, z, float("-inf"))  # the mask above stays aligned, for vectorized reads
        largest_so_far = tl.maximum(largest, z)
        total = total * tl.exp(largest - largest_so_far) + tl.exp(z - largest_so_far)
        largest = largest_so_far
    row_largest = tl.max(largest, 0)
    row_total = tl.sum(total * tl.exp(largest - row_largest), 0)
    at_target, _ = _cap(logits, bias, target, is_valid, softcap)
    loss = tl.where(is_valid, tl.log(row_total) + (row_largest - at_target), float("nan"))
    tl.store(losses + row, tl.where(n_used > 0, loss, 0.0))
    for start in range(0, size, block):
        columns = start + lanes
        z, slope = _cap(logits, bias, columns, columns < n_read, softcap)
        p = tl.exp(z - row_largest) / row_total
        gradient = tl.where(columns == target.to(tl.int32), p - 1, p) * slope
        gradient = tl.where(columns < n_used, gradient, 0.0)
        tl.store(grad + columns, gradient, mask=columns < size)


def triton_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignored: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    dtype: torch.dtype,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """Variant of :func:`toolkit.models.cross_entropy.cross_entropy_` that does not overwrite the logits.

    The columns of ``logits`` must be contiguous; rows may have a stride. The loss of a target outside the vocabulary is
    NaN.
    """
    rows, size = logits.shape
    losses, grad = logits.new_empty(rows), torch.empty(rows, size, dtype=dtype, device=logits.device)
    # the kernel takes no strides of vectors, and labels[:, -1:].reshape(-1) is a strided view
    vectors = (None if t is None else t.contiguous() for t in (targets, ignored, bias))
    sizes = logits.stride(0), size, size - padding
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _kernel[(rows,)](
            logits, *vectors, losses, grad, *sizes, softcap,
            block=min(COLUMNS, triton.next_power_of_2(size)), num_warps=WARPS,
        )  # fmt: skip
    return losses, grad
