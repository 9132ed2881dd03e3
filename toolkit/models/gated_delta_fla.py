"""Run the gated delta rule with flash-linear-attention's kernels on CUDA, where the package is installed.

A kernel is compared with the form in torch first, and not used if its output or a gradient differs.
"""

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.errors import first_line

DEVICES, DTYPES = ("cuda",), (torch.bfloat16, torch.float16)
TOLERANCE = 0.02  # of the norm, as for attention

Rule = Callable[..., tuple[Tensor, ...]]


def has_kernel(
    k: Tensor, v: Tensor, state: Tensor | None, starts: Tensor | None, forward: Rule, backward: Rule
) -> bool:
    """Whether to use the kernel: in 16 bits, because it would round fp32, and with a state or documents, not both.

    ``forward`` and ``backward`` are :func:`run` and :func:`gradients` in torch.
    """
    if v.device.type not in DEVICES or v.dtype not in DTYPES or (state is not None and starts is not None):
        return False
    return _passes(v.device, v.dtype, k.size(3), v.size(3), forward, backward)


@functools.cache
def _passes(device: torch.device, dtype: torch.dtype, key: int, value: int, forward: Rule, backward: Rule) -> bool:
    slower = "torch's operators are used instead, which are slower"
    if importlib.util.find_spec("fla") is None:
        warnings.warn(f"linear attention: flash-linear-attention is not installed; {slower}", stacklevel=2)
        return False
    try:
        with torch.inference_mode(False):
            error = _largest_error(device, dtype, key, value, forward, backward)
    except Exception as raised:  # an import or a kernel may raise anything
        failure = f"{type(raised).__name__}: {first_line(raised)[:200]}"
    else:
        if error <= TOLERANCE:
            return True
        failure = f"a relative error of {error:.3g} in the self-check"
    warnings.warn(f"flash-linear-attention in {dtype} on {device}: {failure}; {slower}", stacklevel=2)
    return False


def _largest_error(
    device: torch.device, dtype: torch.dtype, key: int, value: int, forward: Rule, backward: Rule
) -> float:
    """Return the largest relative error of outputs and gradients of packed rows, and of rows that have a state."""
    generator = torch.Generator().manual_seed(0)  # a separate generator keeps the run's RNG state
    shapes = [(200, 2, key), (200, 2, key), (200, 4, value), (200, 4), (200, 4), (200, 4, value), (4, key, value)]
    q, k, v, decay, beta, grad, state = (torch.randn(2, *s, generator=generator, dtype=torch.float32) for s in shapes)
    q, k, v, grad = (x.to(device, dtype) for x in (q, k, v, grad))
    inputs, state = (q, k, v, -0.1 * decay.exp().to(device), beta.sigmoid().to(device)), state.to(device)
    exact, starts = [x.float() for x in inputs], torch.zeros(2, 200, dtype=torch.bool, device=device)
    starts[0, 60:62] = starts[0, 130] = True
    errors = []
    for rest in ((None, starts), (state, None)):
        expected = *forward(*exact, *rest), *backward(grad.float(), state, *exact, *rest)
        actual = *run(*inputs, *rest), *gradients(grad, state, *inputs, *rest)
        errors += [float((a.float() - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=False)]
    return max(errors, key=lambda error: math.inf if math.isnan(error) else error)


def run(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return y and the last state, see :func:`toolkit.models.gated_delta.gated_delta_rule`."""
    tensors, bounds, is_last = _packed(*inputs)
    with torch.no_grad():
        y, states = _call(tensors, bounds)
    return y.reshape(inputs[2].shape).contiguous(), states[is_last].contiguous()


def gradients(grad: Tensor, grad_last: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, log_decay, beta and, if there is one, the state. Repeats the forward pass."""
    tensors, bounds, is_last = _packed(*inputs)
    # The operator runs below autograd, where only the kernel's autograd.Function is recorded: its inputs are leaves.
    leaves = [None if t is None else t.detach().requires_grad_() for t in tensors]
    with torch.enable_grad():
        y, states = _call(leaves, bounds)
    grad_states = torch.zeros_like(states)
    grad_states[is_last] = grad_last.to(states.dtype)
    found = torch.autograd.grad((y, states), [t for t in leaves if t is not None], (grad.reshape(y.shape), grad_states))
    q, k = (g.view(*x.shape[:3], -1, x.size(3)).sum(3) for g, x in zip(found, inputs[:2], strict=False))
    rest = (g.view(x.shape) for g, x in zip(found[2:], inputs[2:6], strict=False))
    return tuple(g.contiguous() for g in (q, k, *rest))


def _packed(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None
) -> tuple[list[Tensor | None], Tensor | None, Tensor | slice]:
    """Return the inputs of the kernel, documents' bounds in flattened rows, and which documents end a row."""
    q, k = (x.repeat_interleave(v.size(2) // k.size(2), dim=2) for x in (q, k))
    if starts is None:
        return [q, k, v, log_decay, beta, state], None, slice(None)
    is_first = F.pad(starts[:, 1:], (1, 0), value=True).flatten()
    bounds = F.pad(is_first.nonzero().squeeze(1), (0, 1), value=is_first.numel())  # reads from the device
    tensors = [x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, log_decay, beta)]
    return [*tensors, None], bounds, bounds[1:] % starts.size(1) == 0


def _call(tensors: list[Tensor | None], bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # an optional package

    *inputs, state = tensors
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "cu_seqlens": bounds}
    y, states = chunk_gated_delta_rule(*inputs, initial_state=state, **options)
    return y, states
