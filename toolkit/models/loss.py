"""Chunked LM head and cross-entropy: the logits of a complete batch are never materialized (M1).

Tokens go through the head in chunks. The logits of a chunk are turned into its loss and, in the same buffer, into the
gradient of the logits. The gradients of input and weight are computed in the forward pass; the backward pass only
scales them. Gradients of log-probabilities are known only in the backward pass, which computes the logits once more.

On 2 cores, this takes 0.6 to 0.9 of the time of full logits and torch's cross-entropy for 1,024 tokens in fp32, also
with vocabularies so small that all tokens fit in one chunk.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toolkit.models.cross_entropy import LARGEST_EXACT_LOSS, CrossEntropy, choose_cross_entropy, cross_entropy_
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.mixed_mm import addmm_fp32_, mm_out_fp32

# Maximum logits and rows per chunk. CPU: fits the caches. CUDA: the gradient of the head, (vocabulary, n_embd) in fp32,
# is read and written once per chunk, which 4,096 rows hide; 2^28 logits (1 GiB in fp32) are 2,093 rows at 128k. Other
# devices and GPUs with less than 40 GB: 2^26.
CPU_CHUNK_LOGITS, CPU_CHUNK_ROWS = 1 << 24, 512
CUDA_CHUNK_LOGITS, CUDA_CHUNK_ROWS, CUDA_CHUNK_MEMORY = 1 << 28, 4096, 40e9
DEVICE_CHUNK_LOGITS = 1 << 26


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the maximum tokens per chunk. If there is no such device here, assume a large GPU."""
    if device.type == "cpu":
        return min(CPU_CHUNK_ROWS, max(1, CPU_CHUNK_LOGITS // vocab_size))
    if device.type != "cuda" or _is_small_gpu(device):
        return max(1, DEVICE_CHUNK_LOGITS // vocab_size)
    return min(CUDA_CHUNK_ROWS, max(1, CUDA_CHUNK_LOGITS // vocab_size))


def _is_small_gpu(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_properties(device).total_memory < CUDA_CHUNK_MEMORY


def head_loss(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    softcap: float | None = None,
    compiled: bool | CrossEntropy = False,
    *,
    log_probs: bool = False,
) -> torch.Tensor:
    """Return the sum over the supervised tokens of the cross-entropy of ``x @ weight.T + bias``, in nats.

    Args:
        x: (..., n_embd).
        weight: (vocabulary, n_embd).
        bias: (vocabulary,) or None.
        labels: (...), int64; rows labeled -100 are ignored and have a zero gradient.
        low_rank: (..., R) and (vocabulary, R), whose product is added to the logits: a head's adapters.
        softcap: Soft-cap the logits z first, softcap * tanh(z / softcap) (Gemma 2).
        compiled: Use a compiled kernel for the cross-entropy, where there is one; or the kernel to use.
        log_probs: Return the log-probability of each label instead, 0 where it is -100, in the shape of ``labels``.

    Returns:
        fp32, a scalar or log-probabilities. Matrix products run in the autocast dtype where autocast is on, else in the
        weight's dtype; softmax and sums are fp32, and so are the logits and the weight's gradient, unrounded, where the
        device has products with 16-bit factors and fp32 results.
    """
    device_type = x.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else weight.dtype
    tensors = (bias, x, weight, *(low_rank or ()))
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    function = _HeadLogProbs if log_probs else _HeadLoss
    return function.apply(labels, dtype, needs_grad, softcap, compiled, *tensors)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, needs_grad, softcap, compiled, bias, *factors):
        with torch.autocast(labels.device.type, enabled=False):  # dtypes are explicit below
            losses, _, grads = _losses_and_grads(labels, dtype, needs_grad, softcap, compiled, None, bias, *factors)
        ctx.grads, ctx.dtypes = grads, [None if t is None else t.dtype for t in (bias, *factors)]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("backward was already called on this loss: gradients are scaled in place, once")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if g is None else g.mul_(grad_output).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
        return *_NO_GRADIENTS, *scaled


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, needs_grad, softcap, compiled, *tensors):
        with torch.autocast(labels.device.type, enabled=False):
            losses, supervised, _ = _losses_and_grads(
                labels, dtype, [False] * len(tensors), softcap, compiled, None, *tensors
            )
        ctx.save_for_backward(labels, *tensors)
        ctx.options = dtype, needs_grad, softcap, compiled
        if supervised is not None:
            losses = losses.new_zeros(labels.numel()).index_copy_(0, supervised, losses)
        return losses.neg_().view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        labels, *tensors = ctx.saved_tensors
        with torch.autocast(labels.device.type, enabled=False):
            *_, grads = _losses_and_grads(labels, *ctx.options, -grad_output.reshape(-1), *tensors)
        return *_NO_GRADIENTS, *(None if g is None else g.to(t.dtype) for g, t in zip(grads, tensors, strict=True))


_NO_GRADIENTS = (None,) * 5  # for the arguments before the tensors


def _losses_and_grads(
    labels: torch.Tensor,
    dtype: torch.dtype,
    needs_grad: list[bool],
    softcap: float | None,
    compiled: bool | CrossEntropy,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    *factors: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor | None]]:
    """Compute the losses, and their gradients.

    The logits are the sum of the products of the pairs of factors. ``scale``, (labels,), is the gradient of each loss;
    None for 1. Sums over chunks (gradients of weight and bias) are fp32 even for a bf16 weight: bf16 would lose small
    summands. This costs one fp32 copy of the head's gradient between forward and backward.

    Returns:
        Losses of the processed rows, (rows,) fp32; indices of these rows, None for all; gradients of bias and factors,
        None where not needed.
    """
    vocab_size, device = factors[1].size(0), labels.device
    supervised, ignored = _supervised_rows(labels.reshape(-1))
    targets = labels.reshape(-1) if supervised is None else labels.reshape(-1)[supervised]
    if scale is not None and supervised is not None:
        scale = scale[supervised]
    bias_needs_grad, *factor_needs_grad = needs_grad
    products = [
        _Product(factors[i], factors[i + 1], factor_needs_grad[i], factor_needs_grad[i + 1], dtype, supervised, ignored)
        for i in range(0, len(factors), 2)
    ]
    bias = None if bias is None else bias.detach()
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_needs_grad else None
    all_losses = [torch.zeros(0, dtype=torch.float32, device=device)]  # the default dtype may be bf16
    grad_dtype = dtype if any(needs_grad) else None
    chunks = _chunks(targets.numel(), chunk_rows(vocab_size, device))
    # one buffer for all chunks: a new allocation for each would cost a page fault per 4 KiB
    rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
    cross_entropy: CrossEntropy = cross_entropy_
    if compiled and grad_dtype is not None:
        kernel = compiled if callable(compiled) else None
        cross_entropy = kernel or choose_cross_entropy(buffer, bias, softcap, grad_dtype)
    for chunk in chunks:
        logits = _logits(products, chunk, buffer[: chunk.stop - chunk.start])
        masked = None if ignored is None else ignored[chunk]
        losses, grad_logits = cross_entropy(logits, targets[chunk], masked, bias, softcap, grad_dtype)
        if device.type == "cpu":
            _replace_inexact(losses, products, chunk, targets, bias, softcap)
        all_losses.append(losses)
        if grad_logits is None:
            continue
        if scale is not None:
            grad_logits.mul_(scale[chunk, None])
        for product in products:
            product.add_gradients(chunk, grad_logits)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0, dtype=torch.float32)
    grads = [grad_bias, *(grad for product in products for grad in product.gradients())]
    return torch.cat(all_losses), supervised, grads


def _chunks(n: int, largest: int) -> list[slice]:
    """Split n rows into as few chunks as possible, of about equal size."""
    size = math.ceil(n / math.ceil(n / largest)) if n else 0
    return [slice(i, min(i + size, n)) for i in range(0, n, size)] if n else []


def _replace_inexact(
    losses: torch.Tensor,
    products: list[_Product],
    chunk: slice,
    targets: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
) -> None:
    """Recompute the losses above LARGEST_EXACT_LOSS from the logits of their rows."""
    inexact = (losses > LARGEST_EXACT_LOSS).nonzero().squeeze(1)
    if inexact.numel():
        rows = inexact + chunk.start
        logits = _logits(products, rows, torch.empty(rows.numel(), products[0].matrix.size(0), dtype=torch.float32))
        logits = logits if bias is None else logits + bias
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        losses[inexact] = F.cross_entropy(logits, targets[rows], reduction="none")


class _Product:
    """``x @ matrix.T``, a term of the logits, and the gradients of both factors, accumulated over chunks.

    Args:
        x: (..., k).
        matrix: (vocabulary, k).
        x_needs_grad, matrix_needs_grad: Allocate and compute the gradient.
        dtype: Compute dtype.
        kept: The rows of x to process; None for all.
        ignored: (processed rows,), bool: rows without a loss; None for none. Their gradient of the logits is 0.
    """

    def __init__(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        x_needs_grad: bool,
        matrix_needs_grad: bool,
        dtype: torch.dtype,
        supervised: torch.Tensor | None,
        ignored: torch.Tensor | None,
    ) -> None:
        rows = x.detach().reshape(-1, x.size(-1))
        rows = (rows if supervised is None else rows[supervised]).to(dtype)
        # 0 times a non-finite value is not 0
        self.rows = rows if ignored is None else rows.masked_fill(ignored[:, None], 0)
        self.matrix = matrix.detach().to(dtype)
        self._shape, self._kept = x.shape, supervised
        self._grad_x = x.new_empty(rows.shape) if x_needs_grad else None
        # empty: the first chunk overwrites it
        make = torch.empty_like if rows.size(0) else torch.zeros_like
        self._grad_matrix = make(matrix, dtype=torch.float32) if matrix_needs_grad else None

    def add_gradients(self, chunk: slice, grad_logits: torch.Tensor) -> None:
        """Accumulate the gradients of a chunk of rows. Call it for the first chunk first."""
        if self._grad_x is not None:
            mm_out_fp32(self._grad_x[chunk], grad_logits, self.matrix)
        if self._grad_matrix is not None:
            write = mm_out_fp32 if chunk.start == 0 else addmm_fp32_
            write(self._grad_matrix, grad_logits.t(), self.rows[chunk])

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of x and of the matrix, where needed."""
        grad = self._grad_x
        if grad is not None:
            if self._kept is not None:
                n = math.prod(self._shape[:-1])
                grad = grad.new_zeros(n, grad.size(1)).index_copy_(0, self._kept, grad)
            grad = grad.view(self._shape)
        return grad, self._grad_matrix


def _supervised_rows(targets: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the indices of the rows to process (None: all), and which of these to ignore (None: none).

    On an accelerator all rows are processed: copying the number of supervised rows to the host would wait for the
    forward pass.
    """
    if targets.device.type != "cpu":
        return None, targets == IGNORE_INDEX
    supervised = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return (None if supervised.numel() == targets.numel() else supervised), None


def _logits(products: list[_Product], rows: slice | torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of the products for some rows in fp32 into ``out`` and return it."""
    for i, product in enumerate(products):
        (addmm_fp32_ if i else mm_out_fp32)(out, product.rows[rows], product.matrix.t())
    return out
