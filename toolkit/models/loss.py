"""Chunked LM head and cross-entropy: the logits of a complete batch are never materialized (M1).

Tokens go through the head in chunks. The logits of a chunk are turned into its loss and, in the same buffer, into the
gradient of the logits. The gradients of input and weight are computed in the forward pass; the backward pass only
scales them. Measured on 2 cores, fp32, 1,024 tokens, forward and backward, milliseconds:

| vocabulary, width | full logits, torch's cross-entropy | chunked |
|---|---|---|
| 4,096, 256 | 35 - 45 | 33 |
| 8,192, 320 | 105 | 79 |
| 50,304, 128 | 383 - 407 | 240 |
| 50,304, 512 | 1,021 - 1,254 | 860 |

So small batches need no separate path: a batch that fits in one chunk is one chunk.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from toolkit.models.labels import IGNORE_INDEX

# Maximum logits per chunk. CPU: fits the caches; 512 rows of 8k and 333 of 50k were the fastest tried. Other devices:
# 2^26 (256 MiB in fp32) keeps the matrix products large: 1,334 rows at 50k, 523 at 128k.
CPU_CHUNK_LOGITS, CPU_CHUNK_ROWS = 1 << 24, 512
DEVICE_CHUNK_LOGITS = 1 << 26


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk."""
    if device.type == "cpu":
        return min(CPU_CHUNK_ROWS, max(1, CPU_CHUNK_LOGITS // vocab_size))
    return max(1, DEVICE_CHUNK_LOGITS // vocab_size)


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the sum over the supervised tokens of the cross-entropy of ``x @ weight.T + bias``, in nats.

    Args:
        x: (..., n_embd).
        weight: (vocabulary, n_embd).
        bias: (vocabulary,) or None.
        labels: (...), int64; rows labeled -100 are ignored and have a zero gradient.
        low_rank: (..., R) and (vocabulary, R), whose product is added to the logits: a head's adapters.
        softcap: Soft-cap the logits z first, softcap * tanh(z / softcap) (Gemma 2).

    Returns:
        An fp32 scalar. Matrix products run in the autocast dtype where autocast is on, else in the weight's dtype;
        softmax and sums are fp32.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    tensors = (bias, x, weight, *(low_rank or ()))
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    return _HeadLoss.apply(labels, dtype, needs_grad, softcap, *tensors)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, needs_grad, softcap, bias, *factors):
        with torch.autocast(labels.device.type, enabled=False):  # dtypes are explicit below
            loss, grads = _loss_and_grads(labels, dtype, needs_grad, softcap, bias, *factors)
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in (bias, *factors)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("backward was already called on this loss: gradients are scaled in place, once")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if g is None else g.mul_(grad_output).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, None, *scaled


def _loss_and_grads(
    labels: torch.Tensor,
    dtype: torch.dtype,
    needs_grad: list[bool],
    softcap: float | None,
    bias: torch.Tensor | None,
    *factors: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss and the gradients of bias and factors (None where not needed) for an output gradient of 1.

    The logits are the sum of the products of the pairs of factors. Sums over chunks (gradients of weight and bias) are
    fp32 even for a bf16 weight: bf16 would lose small summands. This costs one fp32 copy of the head's gradient between
    forward and backward.
    """
    targets, vocab_size, device = labels.reshape(-1), factors[1].size(0), labels.device
    kept = _supervised_rows(targets)
    if kept is not None:
        targets = targets[kept]
    ignored, n = targets == IGNORE_INDEX, targets.numel()
    bias_needs_grad, *factor_needs_grad = needs_grad
    products = [
        _Product(factors[i], factors[i + 1], factor_needs_grad[i], factor_needs_grad[i + 1], dtype, kept, ignored)
        for i in range(0, len(factors), 2)
    ]
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_needs_grad else None
    loss = torch.zeros((), dtype=torch.float32, device=device)
    step = min(chunk_rows(vocab_size, device), max(1, n))
    # one buffer for all chunks: a new allocation for each would cost a page fault per 4 KiB
    buffer = torch.empty(step, vocab_size, dtype=torch.float32, device=device)
    for i in range(0, n, step):
        chunk = slice(i, i + step)
        is_supervised = ~ignored[chunk]
        logits = _logits(products, chunk, bias, buffer[: is_supervised.numel()])
        loss += _loss_and_grad_of_logits(logits, targets[chunk], is_supervised, any(needs_grad), softcap)
        grad_logits = logits.to(dtype)
        for product in products:
            product.add_gradients(chunk, grad_logits)
        if grad_bias is not None:
            grad_bias += is_supervised.to(torch.float32) @ logits
    return loss, [grad_bias, *(grad for product in products for grad in product.gradients())]


class _Product:
    """``x @ matrix.T``, a term of the logits, and the gradients of both factors, accumulated over chunks.

    Args:
        x: (..., k).
        matrix: (vocabulary, k).
        x_needs_grad: Compute the gradient of x.
        matrix_needs_grad: Compute the gradient of matrix; otherwise nothing of its size is allocated.
        dtype: Compute dtype.
        kept: The rows of x to process; None for all.
        ignored: (processed rows,), bool: rows excluded from the loss.
    """

    def __init__(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        x_needs_grad: bool,
        matrix_needs_grad: bool,
        dtype: torch.dtype,
        kept: torch.Tensor | None,
        ignored: torch.Tensor,
    ) -> None:
        rows = x.detach().reshape(-1, x.size(-1))
        rows = rows if kept is None else rows[kept]
        self.rows = rows.to(dtype).masked_fill(ignored[:, None], 0)  # no contribution to the matrix's gradient
        self.matrix = matrix.detach().to(dtype)
        self._shape, self._kept, self._ignored = x.shape, kept, ignored
        self._grad_x = x.new_empty(rows.shape) if x_needs_grad else None
        self._grad_matrix = torch.zeros_like(matrix, dtype=torch.float32) if matrix_needs_grad else None

    def add_gradients(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Accumulate the gradients of a chunk of rows."""
        if self._grad_x is not None:
            self._grad_x[chunk] = grad_logits @ self.matrix
        if self._grad_matrix is not None:
            _add_product(self._grad_matrix, grad_logits.t(), self.rows[chunk])

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of x and of the matrix, where needed."""
        grad = self._grad_x
        if grad is not None:
            grad.masked_fill_(self._ignored[:, None], 0)
            if self._kept is not None:
                n = math.prod(self._shape[:-1])
                grad = grad.new_zeros(n, grad.size(1)).index_copy_(0, self._kept, grad)
            grad = grad.view(self._shape)
        return grad, self._grad_matrix


def _supervised_rows(targets: torch.Tensor) -> torch.Tensor | None:
    """Return the indices of the supervised rows, or None to process all rows.

    On an accelerator their number would have to be copied to the host, which would wait for the forward pass.
    """
    if targets.device.type != "cpu":
        return None
    kept = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return None if kept.numel() == targets.numel() else kept


def _logits(products: list[_Product], chunk: slice, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of the products and the bias, for a chunk of rows, in fp32 into ``out`` and return it."""
    first, *others = products
    if first.matrix.dtype == torch.float32:
        torch.mm(first.rows[chunk], first.matrix.t(), out=out)
    else:
        out.copy_(first.rows[chunk] @ first.matrix.t())
    for other in others:
        _add_product(out, other.rows[chunk], other.matrix.t())
    if bias is not None:
        out += bias.detach()
    return out


def _loss_and_grad_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, is_supervised: torch.Tensor, needs_grad: bool, softcap: float | None
) -> torch.Tensor:
    """Return the summed loss of the supervised rows; overwrite the logits with their gradient, softmax - one-hot.

    With soft-capping the gradient is multiplied by the slope of the cap, 1 - tanh^2.
    """
    slope = None
    if softcap is not None:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square() if needs_grad else None
        logits.mul_(softcap)
    log_p = torch.log_softmax(logits, dim=1, out=logits)
    at = targets.where(is_supervised, 0)[:, None]
    loss = -log_p.gather(1, at).squeeze(1).where(is_supervised, 0.0).sum()
    if needs_grad:
        log_p.exp_()
        log_p.scatter_add_(1, at, log_p.new_full((1, 1), -1.0).expand_as(at))
        if slope is not None:
            log_p.mul_(slope)
    return loss


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, with total in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
