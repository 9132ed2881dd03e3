"""Chunked LM head and cross-entropy: the logits of a complete batch are never materialized (M1).

Tokens go through the head in chunks. Each chunk's logits are overwritten with their gradient. The forward pass computes
the gradients of input and weight; the backward pass only scales them. With log-probabilities, the backward pass
recomputes the logits, because it needs the upstream gradient.

On 2 cores, this takes 0.6 to 0.9 times as long as full logits with torch's cross-entropy (1,024 tokens, fp32), even if
all tokens fit in one chunk.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toolkit.models.aligned import aligned_rows
from toolkit.models.cross_entropy import (
    LARGEST_EXACT_LOSS,
    CrossEntropy,
    add_bias_and_cap_,
    choose_cross_entropy,
    cross_entropy_,
)
from toolkit.models.labels import IGNORE_INDEX
from toolkit.models.mixed_mm import addmm_fp32_, matmul_dtype, mm_out_fp32
from toolkit.private_torch import has_no_data

# Maximum logits and rows per chunk. CPU: fits the caches. CUDA: the gradient of the head, (vocabulary, n_embd) in fp32,
# is read and written once per chunk, which 4,096 rows hide; 2^28 logits (1 GiB in fp32) are 2,093 rows at 128k. Other
# devices and GPUs with less than 40 GB: 2^26.
CPU_CHUNK_LOGITS, CPU_CHUNK_ROWS = 1 << 24, 512
CUDA_CHUNK_LOGITS, CUDA_CHUNK_ROWS, CUDA_CHUNK_MEMORY = 1 << 28, 4096, 40e9
DEVICE_CHUNK_LOGITS = 1 << 26
COMPARED_TENSORS = 4
"""Tensors of the size of a chunk's logits that a comparison with another model's needs, in addition to the logits."""


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Return the maximum number of tokens per chunk. Assumes a large GPU if the device is not available."""
    if device.type == "cpu":
        return min(CPU_CHUNK_ROWS, max(1, CPU_CHUNK_LOGITS // vocab_size))
    if device.type != "cuda" or _is_small_gpu(device):
        return max(1, DEVICE_CHUNK_LOGITS // vocab_size)
    return min(CUDA_CHUNK_ROWS, max(1, CUDA_CHUNK_LOGITS // vocab_size))


def _is_small_gpu(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_properties(device).total_memory < CUDA_CHUNK_MEMORY


class RowLoss(ABC):
    """A loss per token to use instead of the cross-entropy, with further inputs of each token."""

    @abstractmethod
    def start(self, dtype: torch.dtype, supervised: Tensor | None, ignored: Tensor | None) -> CrossEntropy:
        """Return a function as in :mod:`toolkit.models.cross_entropy`, to call for one chunk of rows after another.

        Args:
            dtype: Compute dtype of matmuls.
            supervised, ignored: The rows to process and those to ignore, see :class:`_Product`.
        """


def head_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    low_rank: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    compiled: bool | CrossEntropy | RowLoss = False,
    *,
    log_probs: bool = False,
    reusable: bool = False,
) -> Tensor:
    """Return the cross-entropy of ``x @ weight.T + bias`` in nats, summed over supervised tokens.

    Args:
        x: (..., n_embd).
        weight: (vocabulary, n_embd).
        bias: (vocabulary,) or None.
        labels: (...), int64; rows labeled -100 are ignored and have a zero gradient.
        low_rank: LoRA factors of the head, (..., R) and (vocabulary, R). Their product is added to the logits.
        softcap: Soft cap of the logits z, softcap * tanh(z / softcap) (Gemma 2), or None.
        compiled: Whether to use a compiled cross-entropy kernel if available, or the function or loss to use.
        log_probs: Return the log-probability of each label instead, 0 where it is -100, in the shape of ``labels``.
        reusable: Allow several backward passes through the loss. Each copies the gradients.

    Returns:
        An fp32 scalar or log-probabilities. Matmuls run in the autocast dtype, or in the weight's dtype without
        autocast. Softmax and sums are fp32. Logits and the weight's gradient are unrounded fp32 if the device supports
        16-bit matmuls with fp32 output.
    """
    dtype = matmul_dtype(weight)
    tensors = (bias, x, weight, *(low_rank or ()))
    needs_grad = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors]
    function = _HeadLogProbs if log_probs else _HeadLoss
    return function.apply(labels, dtype, needs_grad, softcap, compiled, reusable, *tensors)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, needs_grad, softcap, compiled, reusable, bias, *factors):
        with torch.autocast(labels.device.type, enabled=False):  # dtypes are explicit below
            losses, _, grads = _losses_and_grads(labels, dtype, needs_grad, softcap, compiled, None, bias, *factors)
        ctx.grads, ctx.reusable = grads, reusable
        ctx.dtypes = [None if t is None else t.dtype for t in (bias, *factors)]
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        if ctx.grads is None:
            raise RuntimeError("backward was already called on this loss: gradients are scaled in place, once")
        multiply, grads = torch.mul if ctx.reusable else Tensor.mul_, ctx.grads
        ctx.grads = grads if ctx.reusable else None
        scaled = [None if g is None else multiply(g, grad_output).to(d) for g, d in zip(grads, ctx.dtypes, strict=True)]
        return *_NO_GRADIENTS, *scaled


class _HeadLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, labels, dtype, needs_grad, softcap, compiled, reusable, *tensors):
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


_NO_GRADIENTS = (None,) * 6  # for the non-tensor arguments


def _losses_and_grads(
    labels: Tensor,
    dtype: torch.dtype,
    needs_grad: list[bool],
    softcap: float | None,
    compiled: bool | CrossEntropy | RowLoss,
    scale: Tensor | None,
    bias: Tensor | None,
    *factors: Tensor,
) -> tuple[Tensor, Tensor | None, list[Tensor | None]]:
    """Compute the losses and their gradients.

    ``factors`` are pairs (x, matrix). The logits are the sum of ``x @ matrix.T``. ``scale``, (labels,), is the upstream
    gradient of each loss; None for 1. The gradients of weight and bias accumulate over chunks in fp32, because bf16
    would lose small summands. This keeps one fp32 copy of the head's gradient between forward and backward.

    Returns:
        Losses of the processed rows, (rows,) fp32; indices of these rows, or None for all; gradients of bias and
        factors, None if not needed.
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
    padded_size = products[0].matrix.size(0)
    padding = padded_size - vocab_size
    bias = None if bias is None else F.pad(bias.detach(), (0, padding))
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and bias_needs_grad else None
    all_losses = [torch.zeros(0, dtype=torch.float32, device=device)]  # the default dtype may be bf16
    grad_dtype = dtype if any(needs_grad) else None
    chunks = _chunks(targets.numel(), chunk_rows(vocab_size, device))
    # one buffer for all chunks: a new allocation for each would cost a page fault per 4 KiB
    rows = max((chunk.stop - chunk.start for chunk in chunks), default=0)
    buffer = torch.empty(rows, padded_size, dtype=torch.float32, device=device)
    cross_entropy: CrossEntropy = cross_entropy_
    if isinstance(compiled, RowLoss):
        cross_entropy = compiled.start(dtype, supervised, ignored)
    elif callable(compiled):
        cross_entropy = compiled
    elif compiled and grad_dtype is not None:
        cross_entropy = choose_cross_entropy(buffer, bias, softcap, grad_dtype, padding)
    for chunk in chunks:
        logits = _logits(products, chunk, buffer[: chunk.stop - chunk.start])
        masked = None if ignored is None else ignored[chunk]
        losses, grad_logits = cross_entropy(logits, targets[chunk], masked, bias, softcap, grad_dtype, padding)
        if device.type == "cpu" and cross_entropy is cross_entropy_ and not has_no_data(losses):
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
        del grad_logits  # before the next chunk's is computed
    grad_bias = None if grad_bias is None else grad_bias[:vocab_size]
    grads = [grad_bias, *(grad for product in products for grad in product.gradients())]
    return torch.cat(all_losses), supervised, grads


def _chunks(n: int, largest: int) -> list[slice]:
    """Split n rows into as few chunks as possible, of about equal size."""
    size = math.ceil(n / math.ceil(n / largest)) if n else 0
    return [slice(i, min(i + size, n)) for i in range(0, n, size)] if n else []


def _replace_inexact(
    losses: Tensor,
    products: list[_Product],
    chunk: slice,
    targets: Tensor,
    bias: Tensor | None,
    softcap: float | None,
) -> None:
    """Recompute losses above LARGEST_EXACT_LOSS from the logits."""
    inexact = (losses > LARGEST_EXACT_LOSS).nonzero().squeeze(1)
    if inexact.numel():
        rows = inexact + chunk.start
        logits = _logits(products, rows, torch.empty(rows.numel(), products[0].matrix.size(0), dtype=torch.float32))
        add_bias_and_cap_(logits, bias, softcap, needs_slope=False)
        losses[inexact] = F.cross_entropy(logits, targets[rows], reduction="none")


class _Product:
    """A term ``x @ matrix.T`` of the logits. Accumulates the gradients of both factors over chunks.

    ``self.matrix`` is padded, see :func:`toolkit.models.aligned.aligned_rows`.

    Args:
        x: (..., k).
        matrix: (vocabulary, k).
        x_needs_grad, matrix_needs_grad: Allocate and compute the gradient.
        dtype: Compute dtype.
        supervised: Indices of the rows of x to process; None for all.
        ignored: (processed rows,), bool: rows with zero loss and zero logits gradient; None if there are none.
    """

    def __init__(
        self,
        x: Tensor,
        matrix: Tensor,
        x_needs_grad: bool,
        matrix_needs_grad: bool,
        dtype: torch.dtype,
        supervised: Tensor | None,
        ignored: Tensor | None,
    ) -> None:
        rows = x.detach().reshape(-1, x.size(-1))
        rows = (rows if supervised is None else rows[supervised]).to(dtype)
        # 0 times a non-finite value is not 0
        self.rows = rows if ignored is None else rows.masked_fill(ignored[:, None], 0)
        self.matrix = aligned_rows(matrix.detach(), dtype)
        self._shape, self._kept, self._size = x.shape, supervised, matrix.size(0)
        self._grad_x = x.new_empty(rows.shape) if x_needs_grad else None
        # uninitialized, because the first chunk overwrites it
        make = torch.empty_like if rows.size(0) else torch.zeros_like
        self._grad_matrix = make(self.matrix, dtype=torch.float32) if matrix_needs_grad else None

    def add_gradients(self, chunk: slice, grad_logits: Tensor) -> None:
        """Accumulate the gradients of a chunk of rows. The first call must be for the first chunk."""
        if self._grad_x is not None:
            mm_out_fp32(self._grad_x[chunk], grad_logits, self.matrix)
        if self._grad_matrix is not None:
            write = mm_out_fp32 if chunk.start == 0 else addmm_fp32_
            write(self._grad_matrix, grad_logits.t(), self.rows[chunk])

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of x and matrix; None if not needed."""
        grad = self._grad_x
        if grad is not None:
            if self._kept is not None:
                n = math.prod(self._shape[:-1])
                grad = grad.new_zeros(n, grad.size(1)).index_copy_(0, self._kept, grad)
            grad = grad.view(self._shape)
        return grad, None if self._grad_matrix is None else self._grad_matrix[: self._size]


def _supervised_rows(targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the rows to process (None for all) and a mask of those to ignore (None for none).

    On an accelerator all rows are processed, because copying the number of supervised rows to the host would sync;
    without data, because the number is not known.
    """
    if targets.device.type != "cpu" or has_no_data(targets):
        return None, targets == IGNORE_INDEX
    supervised = (targets != IGNORE_INDEX).nonzero().squeeze(1)
    return (None if supervised.numel() == targets.numel() else supervised), None


def _logits(products: list[_Product], rows: slice | Tensor, out: Tensor) -> Tensor:
    """Write the fp32 logits of some rows into ``out`` and return it."""
    for i, product in enumerate(products):
        (addmm_fp32_ if i else mm_out_fp32)(out, product.rows[rows], product.matrix.t())
    return out


def mask_until_last_label(labels: Tensor) -> Tensor:
    """Return a mask, (B, T) bool, of the tokens up to each row's last supervised one.

    Later tokens, such as padding, cannot affect the loss, because attention is causal.
    """
    supervised = (labels != IGNORE_INDEX).int()
    return supervised.flip(1).cumsum(1).flip(1) > 0
