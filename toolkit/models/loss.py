"""Head and cross-entropy in one, so that the logits of a whole batch never exist (M1).

The rows (tokens) go through the head a chunk at a time. A chunk's logits are turned into its loss and, in the same
buffer, into the gradient of the logits; the gradients of input and weight are made at once, in the forward pass, and
the backward pass only scales them. Measured on 2 cores, fp32, 1,024 tokens, forward and backward, milliseconds:

| vocabulary, width | whole logits, torch's cross-entropy | here |
|---|---|---|
| 4,096, 256 | 35 - 45 | 33 |
| 8,192, 320 | 105 | 79 |
| 50,304, 128 | 383 - 407 | 240 |
| 50,304, 512 | 1,021 - 1,254 | 860 |

So there is no second way for small batches: a batch that fits in one chunk is simply one chunk.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable

from toolkit.models.labels import IGNORE_INDEX

# A chunk has at most so many logits. CPU: fits the caches better, 512 rows of 8k and 333 of 50k were the fastest tried.
# Elsewhere 2^26 (256 MiB in fp32) keeps the matrix products large: 1,334 rows at 50k, 523 at 128k.
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
    cap: float | None = None,
) -> torch.Tensor:
    """Return the sum over the supervised tokens of the cross-entropy of ``x @ weight.T + bias``, in nats.

    Args:
        x: (..., n_embd).
        weight: (vocabulary, n_embd).
        bias: (vocabulary,) or None.
        labels: (...), int64; rows labelled -100 count for nothing and get a gradient of zero.
        low_rank: (..., R) and (vocabulary, R), whose product is added to the logits: a head's adapters.
        cap: The logits z become cap * tanh(z / cap) first (Gemma 2).

    Returns:
        An fp32 scalar. Matrix products run in the autocast dtype where autocast is on, else in the weight's dtype;
        softmax and sums are fp32.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    tensors = (bias, x, weight, *(low_rank or ()))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    return _HeadLoss.apply(labels, dtype, wanted, cap, *tensors)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, wanted, cap, bias, *factors):
        with torch.autocast(labels.device.type, enabled=False):  # dtypes are explicit below
            loss, grads = _loss_and_grads(labels, dtype, wanted, cap, bias, *factors)
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in (bias, *factors)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("the loss was already differentiated: its gradients are scaled in place, once")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if g is None else g.mul_(grad_output).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, None, *scaled


def _loss_and_grads(
    labels: torch.Tensor,
    dtype: torch.dtype,
    wanted: list[bool],
    cap: float | None,
    bias: torch.Tensor | None,
    *factors: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Return the loss and the gradients of bias and factors (None where not wanted) for an output gradient of 1.

    The factors are pairs whose products add up to the logits. The sums over chunks (weight and bias) are kept in fp32
    even for a bf16 weight: in bf16 every chunk would round away what is small beside the sum. The price is one fp32
    copy of the head's gradient between forward and backward.
    """
    targets, vocab_size, device = labels.reshape(-1), factors[1].size(0), labels.device
    kept = _supervised_rows(targets)
    if kept is not None:
        targets = targets[kept]
    ignored, n = targets == IGNORE_INDEX, targets.numel()
    want_bias, *want = wanted
    products = [
        _Product(factors[i], factors[i + 1], want[i], want[i + 1], dtype, kept, ignored)
        for i in range(0, len(factors), 2)
    ]
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
    loss = torch.zeros((), dtype=torch.float32, device=device)
    step = min(chunk_rows(vocab_size, device), max(1, n))
    # one buffer for all chunks: fresh memory for each would cost a page fault per 4 KiB
    buffer = torch.empty(step, vocab_size, dtype=torch.float32, device=device)
    for i in range(0, n, step):
        chunk = slice(i, i + step)
        counts = ~ignored[chunk]
        logits = _logits(products, chunk, bias, buffer[: counts.numel()])
        loss += _loss_and_grad_of_logits(logits, targets[chunk], counts, any(wanted), cap)
        grad_logits = logits.to(dtype)
        for product in products:
            product.add_gradients(chunk, grad_logits)
        if want_bias:
            grad_bias += counts.to(torch.float32) @ logits
    return loss, [grad_bias, *(grad for product in products for grad in product.gradients())]


class _Product:
    """``x @ matrix.T``, a term of the logits, and the gradients of both factors as far as the chunks have come.

    Args:
        x: (..., k).
        matrix: (vocabulary, k).
        want_x: Make the gradient of x.
        want_matrix: Make the gradient of matrix; else nothing of its size is made.
        dtype: To compute in.
        kept: The rows of x that are worked through; None for all.
        ignored: (rows worked through,), bool: those that count for nothing.
    """

    def __init__(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        want_x: bool,
        want_matrix: bool,
        dtype: torch.dtype,
        kept: torch.Tensor | None,
        ignored: torch.Tensor,
    ) -> None:
        rows = x.detach().reshape(-1, x.size(-1))
        rows = rows if kept is None else rows[kept]
        self.rows = rows.to(dtype).masked_fill(ignored[:, None], 0)  # so they add nothing to the matrix's gradient
        self.matrix = matrix.detach().to(dtype)
        self._shape, self._kept, self._ignored = x.shape, kept, ignored
        self._grad_x = x.new_empty(rows.shape) if want_x else None
        self._grad_matrix = torch.zeros_like(matrix, dtype=torch.float32) if want_matrix else None

    def add_gradients(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Add what a chunk of rows contributes."""
        if self._grad_x is not None:
            self._grad_x[chunk] = grad_logits @ self.matrix
        if self._grad_matrix is not None:
            _add_product(self._grad_matrix, grad_logits.t(), self.rows[chunk])

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Those of x and of the matrix, where wanted."""
        grad = self._grad_x
        if grad is not None:
            grad.masked_fill_(self._ignored[:, None], 0)
            if self._kept is not None:
                n = math.prod(self._shape[:-1])
                grad = grad.new_zeros(n, grad.size(1)).index_copy_(0, self._kept, grad)
            grad = grad.view(self._shape)
        return grad, self._grad_matrix


def _supervised_rows(targets: torch.Tensor) -> torch.Tensor | None:
    """The indices of the rows that count, or None where all are to be worked through.

    On an accelerator the number would have to come back to the host, which waits for the whole forward pass.
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
    logits: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, want_grad: bool, cap: float | None
) -> torch.Tensor:
    """Return the summed loss of the rows that count; overwrite the logits with softmax - one-hot, their gradient.

    Capped logits have that gradient times the slope of the cap, 1 - tanh^2.
    """
    slope = None
    if cap is not None:
        logits.div_(cap).tanh_()
        slope = 1 - logits.square() if want_grad else None
        logits.mul_(cap)
    log_p = torch.log_softmax(logits, dim=1, out=logits)
    at = targets.where(counts, 0)[:, None]
    loss = -log_p.gather(1, at).squeeze(1).where(counts, 0.0).sum()
    if want_grad:
        log_p.exp_()
        log_p.scatter_add_(1, at, log_p.new_full((1, 1), -1.0).expand_as(at))
        if slope is not None:
            log_p.mul_(slope)
    return loss


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, total in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
