"""Head and cross-entropy in one, so that the logits of a whole batch never exist (law M1).

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

import torch
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # the label of a token with nothing to learn, as everywhere in PyTorch

# A chunk has at most so many logits. CPU: fits the caches better, 512 rows of 8k and 333 of 50k were the fastest tried.
# Elsewhere 2^26 (256 MiB in fp32) keeps the matrix products large: 1,334 rows at 50k, 523 at 128k.
CPU_CHUNK_LOGITS, CPU_CHUNK_ROWS = 1 << 24, 512
DEVICE_CHUNK_LOGITS = 1 << 26


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk."""
    if device.type == "cpu":
        return min(CPU_CHUNK_ROWS, max(1, CPU_CHUNK_LOGITS // vocab_size))
    return max(1, DEVICE_CHUNK_LOGITS // vocab_size)


def head_loss(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum over the supervised tokens of the cross-entropy of ``x @ weight.T + bias``, in nats.

    Args:
        x: (..., n_embd).
        weight: (vocabulary, n_embd).
        bias: (vocabulary,) or None.
        labels: (...), int64; rows labelled -100 count for nothing and get a gradient of zero.

    Returns:
        An fp32 scalar. Matrix products run in the autocast dtype where autocast is on, else in the weight's dtype;
        softmax and sums are fp32.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias)]
    return _HeadLoss.apply(x, weight, bias, labels, dtype, wanted)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, labels, dtype, wanted):
        with torch.autocast(x.device.type, enabled=False):  # dtypes are explicit below
            loss, grads = _loss_and_grads(x, weight, bias, labels, dtype, *wanted)
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in (x, weight, bias)]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("the loss was already differentiated: its gradients are scaled in place, once")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if g is None else g.mul_(grad_output).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
        return *scaled, None, None, None


def _loss_and_grads(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    dtype: torch.dtype,
    want_x: bool,
    want_weight: bool,
    want_bias: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
    """Return the loss and the gradients of x, weight and bias (None where not wanted) for an output gradient of 1.

    The sums over chunks (weight and bias) are kept in fp32 even for a bf16 weight: in bf16 every chunk would round away
    what is small beside the sum. The price is one fp32 copy of the head's gradient between forward and backward.
    """
    rows, targets = x.detach().reshape(-1, x.size(-1)), labels.reshape(-1)
    n, vocab_size = rows.size(0), weight.size(0)
    kept = _supervised_rows(targets)
    if kept is not None:
        rows, targets = rows[kept], targets[kept]
    ignored = targets == IGNORE_INDEX
    rows = rows.to(dtype).masked_fill(ignored[:, None], 0)  # so they add nothing to the weight's gradient
    head = weight.detach().to(dtype)
    grad_x = x.new_empty(rows.shape) if want_x else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if want_bias else None
    loss = torch.zeros((), dtype=torch.float32, device=x.device)
    step = min(chunk_rows(vocab_size, x.device), max(1, rows.size(0)))
    # one buffer for all chunks: fresh memory for each would cost a page fault per 4 KiB
    buffer = torch.empty(step, vocab_size, dtype=torch.float32, device=x.device)
    for i in range(0, rows.size(0), step):
        chunk, counts = rows[i : i + step], ~ignored[i : i + step]
        logits = _logits(chunk, head, bias, buffer[: chunk.size(0)])
        loss += _loss_and_grad_of_logits(logits, targets[i : i + step], counts, want_x or want_weight or want_bias)
        grad_logits = logits.to(dtype)
        if want_x:
            grad_x[i : i + step] = grad_logits @ head
        if want_weight:
            _add_product(grad_weight, grad_logits.t(), chunk)
        if want_bias:
            grad_bias += counts.to(torch.float32) @ logits
    if want_x:
        grad_x.masked_fill_(ignored[:, None], 0)
        if kept is not None:
            grad_x = grad_x.new_zeros(n, grad_x.size(1)).index_copy_(0, kept, grad_x)
        grad_x = grad_x.view(x.shape)
    return loss, (grad_x, grad_weight, grad_bias)


def _supervised_rows(targets: torch.Tensor) -> torch.Tensor | None:
    """The indices of the rows that count, or None where all are to be worked through.

    On an accelerator the number would have to come back to the host, which waits for the whole forward pass.
    """
    if targets.device.type != "cpu":
        return None
    kept = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return None if kept.numel() == targets.numel() else kept


def _logits(chunk: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """Write chunk @ head.T + bias in fp32 into ``out`` and return it."""
    if head.dtype == torch.float32:
        torch.mm(chunk, head.t(), out=out)
    else:
        out.copy_(chunk @ head.t())
    if bias is not None:
        out += bias.detach()
    return out


def _loss_and_grad_of_logits(
    logits: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, want_grad: bool
) -> torch.Tensor:
    """Return the summed loss of the rows that count; overwrite the logits with softmax - one-hot, their gradient."""
    log_p = torch.log_softmax(logits, dim=1, out=logits)
    at = targets.where(counts, 0)[:, None]
    loss = -log_p.gather(1, at).squeeze(1).where(counts, 0.0).sum()
    if want_grad:
        log_p.exp_()
        log_p.scatter_add_(1, at, log_p.new_full((1, 1), -1.0).expand_as(at))
    return loss


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, total in fp32."""
    if a.dtype == torch.float32:
        total.addmm_(a, b)
    else:
        total += a @ b
