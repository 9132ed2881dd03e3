"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and the causal convolution of Gated DeltaNet layers.

A head's state S, (key_size, value_size), stores values by key. Token t decays it by a_t, in (0, 1], and replaces the
fraction b_t of the value that is stored under its key:

    S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T
    y_t = S_t^T q_t

Tokens are computed in chunks (WY form, Yang et al. 2024, arXiv 2406.06484). With S the state before a chunk, D_ij the
decay from token j to token i, g_i the decay from the chunk's begin to token i, and rows of matrices being tokens:

    A = I + tril(b_i D_ij k_i k_j, -1)
    N = A^-1 b (V - g K S)          what each token adds under its key
    Y = g Q S + (D * Q K^T) N
    S' = g_C S + (D_C K)^T N

Only N and S' need the chunk before, so only they are computed in a loop over chunks. D is zero between tokens of
different documents, and g for documents that start in the chunk; all else follows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from toolkit.models import gated_delta_fla
from toolkit.models.gated_delta_fla import has_kernel

_EPS = 1e-6  # of the L2 norm, added to the sum of squares


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    starts: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule in fp32, or in fp64 for fp64 inputs.

    Args:
        q, k: (B, T, n_key_heads, key_size). They are L2-normalized here, and q is scaled by key_size**-0.5.
        v: (B, T, n_value_heads, value_size). Consecutive value heads share a key head.
        log_decay: (B, T, n_value_heads), ln a_t, at most 0.
        beta: (B, T, n_value_heads), b_t, in [0, 1].
        state: (B, n_value_heads, key_size, value_size), the state before the first token; None for zeros.
        starts: (B, T), bool: True at the first token of a document, which nothing before it influences.
        chunk_size: Tokens per chunk, a power of two.

    Returns:
        y, like v, and the state after the last token, in fp32 (fp64).
    """
    if q.size(1) == 1 and state is not None:
        return _one_token(q, k, v, log_decay, beta, state, starts)
    return _delta_rule(q, k, v, log_decay, beta, state, starts, chunk_size)


def _one_token(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype, repeats = _compute_dtype(v), v.size(2) // k.size(2)
    if starts is not None:
        state = state.masked_fill(starts[..., None, None], 0)
    q, k = (_normalized(x[:, 0].to(dtype)).repeat_interleave(repeats, dim=1)[..., None] for x in (q, k))
    state = state.to(dtype) * log_decay[:, 0, :, None, None].to(dtype).exp()
    delta = (v[:, 0].to(dtype) - (state * k).sum(-2)) * beta[:, 0, :, None].to(dtype)
    state = state + k * delta[..., None, :]  # no matmul: autocast would round it
    y = (state * (q * q.size(-2) ** -0.5)).sum(-2)
    return y[:, None].to(v.dtype), state


# Custom operators, because a compiler would unroll the loop over chunks, and autograd would save its intermediates.
@torch.library.custom_op("toolkit::gated_delta_rule", mutates_args=())
def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """See :func:`gated_delta_rule`."""
    with torch.autocast(v.device.type, enabled=False):
        if has_kernel(k, v, state, starts, _outputs, _gradients):
            return gated_delta_fla.run(q, k, v, log_decay, beta, state, starts)
        return _outputs(q, k, v, log_decay, beta, state, starts, chunk_size)


@_delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = (v.size(0), v.size(2), k.size(3), v.size(3))
    return v.new_empty(v.shape), v.new_empty(shape, dtype=_compute_dtype(v))


@torch.library.custom_op("toolkit::gated_delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    grad: Tensor,
    grad_last: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None,
    starts: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and the state before the first token.

    The states are recomputed: saved, they would need more memory than all inputs.
    """
    with torch.autocast(v.device.type, enabled=False):
        inputs = grad, grad_last, q, k, v, log_decay, beta, state, starts
        has_fla = has_kernel(k, v, state, starts, _outputs, _gradients)
        gradients = gated_delta_fla.gradients(*inputs) if has_fla else _gradients(*inputs, chunk_size)
    grad_q, grad_k, grad_v, grad_log, grad_beta, *grad_state = gradients
    return grad_q, grad_k, grad_v, grad_log, grad_beta, grad_state[0] if grad_state else torch.zeros_like(grad_last)


@_delta_rule_backward.register_fake
def _(
    grad: Any, grad_last: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, log_decay, beta, grad_last))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.chunk_size = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_last: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read only once, because activation checkpointing recomputes them
    *gradients, grad_state = _delta_rule_backward(grad, grad_last, *saved, ctx.chunk_size)
    return *gradients, None if saved[5] is None else grad_state, None, None


_delta_rule.register_autograd(_backward, setup_context=_setup_context)


class _Chunks(NamedTuple):
    """Inputs in chunks of C tokens: shapes start with (chunks, B, n_key_heads, value heads per key head).

    Args:
        q, k: (..., 1, C, key_size), normalized; q is scaled.
        v: (..., C, value_size).
        beta: (..., C, 1).
        decay: (..., C, C), D.
        from_start: (..., C, 1), g; zero for documents that start in the chunk.
        similar: (..., 1, C, C), K K^T.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    from_start: Tensor
    similar: Tensor

    @property
    def to_end(self) -> Tensor:
        """(..., C, 1): decay from each token to the chunk's last."""
        return self.decay[..., -1, :, None]

    @property
    def total(self) -> Tensor:
        """(..., 1, 1): decay of the state over the chunk."""
        return self.from_start[..., -1:, :]

    def inverse(self) -> Tensor:
        """Return A^-1, (..., C, C), from the inverses of its diagonal blocks of 1, 2, 4, ... rows.

        Several times faster than torch's triangular solver on the CPU.
        """
        system = self.beta * self.similar * self.decay
        size, inverse = (
            1,
            torch.eye(system.size(-1), dtype=system.dtype, device=system.device).expand_as(system).clone(),
        )
        while size < system.size(-1):
            a, b = (_diagonal_blocks(x, 2 * size) for x in (system, inverse))
            upper, lower = slice(size), slice(size, None)
            b[..., lower, upper] = -b[..., lower, lower] @ (a[..., lower, upper] @ b[..., upper, upper])
            size *= 2
        return inverse


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """Return a view of the blocks on the diagonal of (..., C, C): (..., C / size, size, size)."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, starts: Tensor | None, chunk_size: int
) -> _Chunks:
    size = 1 << (min(chunk_size, v.size(1)) - 1).bit_length()
    q, k = (_normalized(_split(x, v, size, k.size(2))) for x in (q, k))
    q = q * q.size(-1) ** -0.5
    v, beta, log_decay = (_split(x, v, size, k.size(2)) for x in (v, beta[..., None], log_decay[..., None]))
    is_same = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    from_start = log_decay.cumsum(-2)
    if starts is not None:
        starts = F.pad(starts, (0, -starts.size(1) % size))
        document = _split(starts.cumsum(1)[..., None, None], starts, size, 1)
        before = torch.cat((torch.zeros_like(document[:1, ..., :1, :]), document[:-1, ..., -1:, :]))
        is_same = is_same & (document == document.mT)
        from_start = from_start.masked_fill(document != before, float("-inf"))
    # Sums of the tokens between j and i, not differences of sums from the start: these would round to the size of the
    # largest sum, be NaN for decays of zero, and depend on other documents.
    between = log_decay.expand(*log_decay.shape[:-1], size).tril(-1).cumsum(-2)
    decay = between.masked_fill_(~is_same, float("-inf")).exp_()
    return _Chunks(q, k, v, beta, decay, from_start.exp(), k @ k.mT)


def _scan(c: _Chunks, inverse: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return N, the state before each chunk, what each token reads from it, K S, and the last state."""
    shape = *c.v.shape[:-2], c.k.size(-1), c.v.size(-1)
    last = c.v.new_zeros(shape[1:]) if state is None else state.to(c.v.dtype).reshape(shape[1:])
    new, states, read, keys = torch.empty_like(c.v), c.v.new_empty(shape), torch.empty_like(c.v), c.to_end * c.k
    for i, total in enumerate(c.total):
        states[i] = last
        read[i] = c.k[i] @ last
        new[i] = inverse[i] @ (c.beta[i] * (c.v[i] - c.from_start[i] * read[i]))
        last = total * last + keys[i].mT @ new[i]
    return new, states, read, last.flatten(1, 2)


def _outputs(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, starts: Tensor | None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`gated_delta_rule`. Letters are those of the module's docstring."""
    c = _prepare(q, k, v, log_decay, beta, starts, chunk_size)
    new, states, _, last = _scan(c, c.inverse(), state)
    y = c.from_start * (c.q @ states) + ((c.q @ c.k.mT) * c.decay) @ new
    return _joined(y, v), last.clone()


def _gradients(
    grad: Tensor, grad_last: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    state: Tensor | None, starts: Tensor | None, chunk_size: int = 64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """See :func:`_delta_rule_backward`. Letters are those of the module's docstring."""
    c = _prepare(q, k, v, log_decay, beta, starts, chunk_size)
    inverse = c.inverse()
    new, states, read, _ = _scan(c, inverse, state)
    grad, scores = _split(grad, v, new.size(-2), k.size(2)), c.q @ c.k.mT
    # the scan in reverse: gradients of N = A^-1 b E with E = V - g K S, and of the state after each chunk
    grad_new, grad_right, grad_states = (scores * c.decay).mT @ grad, torch.empty_like(new), torch.empty_like(states)
    keys, later = c.to_end * c.k, grad_last.reshape(states.shape[1:])
    for i in reversed(range(len(states))):
        grad_states[i] = later
        grad_right[i] = inverse[i].mT @ (grad_new[i] + keys[i] @ later)
        to_query, to_key = c.from_start[i] * grad[i], c.from_start[i] * c.beta[i] * grad_right[i]
        later = c.total[i] * later + c.q[i].mT @ to_query - c.k[i].mT @ to_key
    grad_error, error = c.beta * grad_right, c.v - c.from_start * read
    grad_read, grad_system = c.from_start * grad_error, -(grad_right @ new.mT).tril(-1) * c.decay
    grad_scores, grad_similar = (grad @ new.mT) * c.decay, grad_system * c.beta
    by_state, by_end = c.from_start * (grad @ states.mT), c.to_end * (new @ grad_states.mT)
    grad_q = grad_scores @ c.k + by_state
    grad_k = grad_scores.mT @ c.q + (grad_similar + grad_similar.mT) @ c.k - grad_read @ states.mT + by_end
    grad_beta = (grad_right * error).sum(-1, keepdim=True) + (grad_system * c.similar).sum(-1, keepdim=True)
    # of ln D and ln g
    grad_decay = grad_scores * scores + grad_similar * c.similar
    grad_decay[..., -1, :] += (c.k * by_end).sum(-1)
    grad_start = (by_state * c.q).sum(-1, keepdim=True) - (grad_read * read).sum(-1, keepdim=True)
    grad_start[..., -1:, :] += c.total * (grad_states * states).sum((-1, -2), keepdim=True)
    upper = torch.ones_like(c.decay[0, 0, 0, 0]).triu()
    grad_log = (upper @ grad_decay).tril(-1).sum(-1, keepdim=True) + upper @ grad_start
    grad_q, grad_k = (
        _normalized_backward(_split(x, v, new.size(-2), k.size(2)), g.sum(3, keepdim=True), scale)
        for x, g, scale in ((q, grad_q, q.size(-1) ** -0.5), (k, grad_k, 1.0))
    )
    gradients = ((grad_q, q), (grad_k, k), (grad_error, v), (grad_log, log_decay), (grad_beta, beta))
    return *(_joined(g, x) for g, x in gradients), later.flatten(1, 2).clone()


def _compute_dtype(v: Tensor) -> torch.dtype:
    return torch.promote_types(v.dtype, torch.float32)


def _split(x: Tensor, v: Tensor, size: int, n_key_heads: int) -> Tensor:
    """(B, T, heads, width) -> (chunks, B, n_key_heads, heads per key head, size, width), padded with zeros."""
    dtype = x.dtype if v.dtype == torch.bool else _compute_dtype(v)
    x = F.pad(x, (0, 0, 0, 0, 0, -x.size(1) % size)).unflatten(1, (-1, size)).unflatten(3, (n_key_heads, -1))
    return x.permute(1, 0, 3, 4, 2, 5).to(dtype).contiguous()


def _joined(x: Tensor, like: Tensor) -> Tensor:
    """Invert :func:`_split`; the result has the shape and dtype of ``like``, with or without a width of 1."""
    x = x.permute(1, 0, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)[:, : like.size(1)]
    return x.reshape(like.shape).to(like.dtype).contiguous()


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _normalized_backward(x: Tensor, grad: Tensor, scale: float) -> Tensor:
    factor = torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)
    unit = x * factor
    return scale * factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))


def causal_conv(
    x: Tensor, weight: Tensor, window: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return silu(convolution) of each channel over its last conv_size tokens, computed in fp32 (fp64).

    Args:
        x: (B, T, channels).
        weight: (channels, conv_size); the last column is of the current token.
        window: (B, conv_size - 1, channels), the inputs before x; None for zeros.
        starts: See :func:`gated_delta_rule`.

    Returns:
        The output, like x, and the window after the last token: zero for tokens before the last start.
    """
    n = weight.size(1) - 1
    if window is None:
        window = x.new_zeros(x.size(0), n, x.size(2))
    is_first = None if starts is None else F.pad(starts, (n, 0))[..., None]
    y = _CausalConv.apply(torch.cat((window, x), dim=1), weight, is_first)
    window = torch.cat((window, x[:, -n:]), dim=1)[:, -n:]
    if is_first is not None:
        document = is_first.cumsum(1)
        window = window.masked_fill(document[:, -n:] != document[:, -1:], 0)
    return y, window


class _CausalConv(torch.autograd.Function):
    """Convolve (B, conv_size - 1 + T, channels), with (B, conv_size - 1 + T, 1) starts or None. Saves only its inputs.

    A sum moves on by one token per column of the weight. At a start it is set to zero first, in place, which costs less
    than a mask of each column's inputs.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_first: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, is_first)
        return F.silu(_convolved(x, weight, is_first)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, is_first = ctx.saved_tensors
        sums = _convolved(x, weight, is_first)
        grad = torch.ops.aten.silu_backward(grad.to(sums.dtype), sums)
        T, grad_x = grad.size(1), torch.zeros_like(x, dtype=grad.dtype)
        grad_weight: list[Tensor] = []
        for i, column in reversed([*enumerate(weight.to(grad.dtype).unbind(1))]):
            grad_x[:, i : i + T].addcmul_(grad, column)
            grad_weight.insert(0, (grad * x[:, i : i + T]).sum((0, 1)))
            if is_first is not None:
                grad.masked_fill_(is_first[:, i : i + T], 0)
        return grad_x.to(x.dtype), torch.stack(grad_weight, dim=1).to(weight.dtype), None


def _convolved(x: Tensor, weight: Tensor, is_first: Tensor | None) -> Tensor:
    first, *columns = weight.to(_compute_dtype(x)).unbind(1)
    sums = x * first
    for i, column in enumerate(columns, 1):
        sums = sums[:, :-1]
        if is_first is not None:
            sums.masked_fill_(is_first[:, i:], 0)
        sums.addcmul_(x[:, i:], column)
    return sums
