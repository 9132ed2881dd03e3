"""Compute the cross-entropy of a chunk of logits and its gradient, the memory-bound part of the head loss.

All implementations return the loss per row in nats, (rows,) fp32, zero if ignored. They also return the gradient of the
summed loss with respect to the logits before bias and soft-capping: softmax - one-hot, times the derivative of the cap,
1 - tanh^2. Arguments:

    logits: (rows, vocabulary), fp32, without the bias. The last ``padding`` columns are ignored and have no gradient.
    targets: (rows,), int64.
    ignored: (rows,), bool: rows with zero loss and gradient; None if no row is ignored.
    bias: (vocabulary,) or None.
    softcap: Soft cap of the logits z, softcap * tanh(z / softcap), or None.
    dtype: Gradient dtype; None to skip the gradient.
    padding: Number of columns to ignore.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.errors import first_line
from toolkit.private_torch import has_no_data

CrossEntropy = Callable[..., tuple[Tensor, Tensor | None]]
LossKernel = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]
"""Maps logits (rows, vocabulary) and targets (rows, 1) to softmax - one-hot, if needed, and the losses (rows,). May
overwrite the logits.
"""

LARGEST_EXACT_LOSS = 80.0
"""In nats. Above this, :func:`cross_entropy_` on a CPU is inexact: probabilities below 1e-38 are denormal or zero."""


def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    ignored: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    dtype: torch.dtype | None,
    padding: int = 0,
    kernel: LossKernel | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses and the gradient. Overwrites ``logits``. ``kernel`` replaces the device's default."""
    slope = add_bias_and_cap_(logits, bias, softcap, dtype is not None)
    if padding:  # after the cap, which would make it finite
        logits[:, -padding:] = -torch.inf
    at = (targets if ignored is None else targets.where(~ignored, 0))[:, None]
    kernel = kernel or (_loss_and_grad_single_exp_ if logits.device.type == "cpu" else _loss_and_grad_)
    grad, losses = kernel(logits, at, dtype is not None)
    losses = losses if ignored is None else losses.masked_fill(ignored, 0.0)
    if dtype is None:
        return losses, None
    if slope is not None:
        grad.mul_(slope)
    if ignored is not None:
        grad.masked_fill_(ignored[:, None], 0.0)
    return losses, grad.to(dtype)


def add_bias_and_cap_(logits: Tensor, bias: Tensor | None, softcap: float | None, needs_slope: bool) -> Tensor | None:
    """Add the bias and cap the logits in place. Return the derivative of the cap, if needed."""
    if bias is not None:
        logits += bias
    if softcap is None:
        return None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square() if needs_slope else None
    logits.mul_(softcap)
    return slope


def _loss_and_grad_single_exp_(logits: Tensor, at: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """Compute the exponential once per logit; it dominates the run time on a CPU. See :data:`LossKernel`."""
    probabilities = torch.softmax(logits, dim=1, out=logits)
    target_probs = probabilities.gather(1, at)
    losses = -target_probs.log().squeeze(1)
    if needs_grad:
        probabilities.scatter_(1, at, target_probs - 1)  # not scatter_add_: one element per row, deterministic
    return probabilities, losses


def _loss_and_grad_(logits: Tensor, at: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """As :func:`_loss_and_grad_single_exp_`, but exact for any loss; computes a second exponential per logit."""
    log_p = torch.log_softmax(logits, dim=1, out=logits)
    target_log_probs = log_p.gather(1, at)
    if needs_grad:
        log_p.exp_().scatter_(1, at, target_log_probs.exp() - 1)
    return log_p, -target_log_probs.squeeze(1)


def pointwise_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignored: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    dtype: torch.dtype,
    padding: int = 0,
) -> tuple[Tensor, Tensor]:
    """Variant of :func:`cross_entropy_` that torch.compile fuses into one kernel."""
    z = logits if bias is None else logits + bias
    slope = None
    if softcap is not None:
        tanh = torch.tanh(z / softcap)
        z, slope = tanh * softcap, 1 - tanh.square()
    columns = torch.arange(z.size(1), device=z.device)
    if padding:
        z = z.where(columns < z.size(1) - padding, -torch.inf)
    largest = z.amax(1, keepdim=True)
    exponentials = (z - largest).exp()
    total = exponentials.sum(1, keepdim=True)
    at = targets.where(~ignored, 0)[:, None]
    losses = (total.log() + largest - z.gather(1, at)).squeeze(1).masked_fill(ignored, 0.0)
    grad = exponentials / total - (columns == at).to(z.dtype)
    grad = grad if slope is None else grad * slope
    return losses, grad.masked_fill(ignored[:, None], 0.0).to(dtype)


def choose_cross_entropy(
    logits: Tensor, bias: Tensor | None, softcap: float | None, dtype: torch.dtype, padding: int = 0
) -> CrossEntropy:
    """Return the fastest kernel that works on this device, else :func:`cross_entropy_`.

    Triton's kernel reads the logits twice and writes a 16-bit gradient, torch.compile's reads them three times, and
    torch's kernels read and write fp32 six times. Before its first use a kernel is compared with :func:`cross_entropy_`
    on a few rows, which syncs the device once per vocabulary size, dtypes, soft cap and padding. On a CPU
    :func:`cross_entropy_` is faster than the others.
    """
    can_run = logits.device.type == "cuda" and dtype.itemsize == 2 and not has_no_data(logits)
    if not can_run or importlib.util.find_spec("triton") is None:
        return cross_entropy_
    bias_dtype = None if bias is None else bias.dtype
    return _checked_kernel(logits.device, logits.size(1), bias_dtype, softcap, dtype, padding)


@functools.cache
def _checked_kernel(
    device: torch.device,
    vocab_size: int,
    bias_dtype: torch.dtype | None,
    softcap: float | None,
    dtype: torch.dtype,
    padding: int,
) -> CrossEntropy:
    generator = torch.Generator().manual_seed(0)
    rows = 8
    logits = (4 * torch.randn(rows, vocab_size, generator=generator, dtype=torch.float32)).to(device)
    bias = None
    if bias_dtype is not None:
        bias = torch.randn(vocab_size, generator=generator, dtype=torch.float32).to(device, bias_dtype)
    targets = torch.randint(0, vocab_size - padding, (rows,), generator=generator).to(device)
    ignored = torch.arange(rows, device=device) == 1
    logits[:2, 0] = torch.nan  # the loss of an ignored row stays 0, and a NaN is not hidden (N7)
    arguments = targets, ignored, bias, softcap, dtype, padding
    expected_losses, expected = cross_entropy_(logits.clone(), *arguments)
    assert expected is not None
    for name, load in (("Triton", triton_kernel), ("compiled", compiled_kernel)):
        try:
            kernel = load()
            losses, grad = kernel(logits, *arguments)
            torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-4, equal_nan=True)
            torch.testing.assert_close(grad[1:].float(), expected[1:].float(), rtol=2e-2, atol=1e-6)  # type: ignore[index]
            return kernel
        except Exception as error:  # compilation can fail in many ways
            what = f"the {name} loss kernel fails its check: {first_line(error)[:200]}"
            warnings.warn(f"{what}; a slower one is used", stacklevel=2)
    return cross_entropy_


def triton_kernel() -> CrossEntropy:
    """Return Triton's kernel. Raises ImportError without Triton."""
    from toolkit.models.cross_entropy_triton import triton_cross_entropy  # needs Triton

    return triton_cross_entropy


def compiled_kernel() -> CrossEntropy:
    """Return :func:`pointwise_cross_entropy`, compiled by torch."""
    # for other numbers of rows than in its check, torch compiles once more
    return torch.compile(pointwise_cross_entropy)
