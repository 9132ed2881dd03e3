"""FlashAttention in plain torch: what aten's operators compute, for CPUs and fp64."""

import warnings
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch.nn.attention import (
    current_flash_attention_impl,
    flex_attention,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from toolkit.models import attention, attention_dispatch, attention_kernels


@contextmanager
def kernels_on_cpu(backend: str = "aot_eager_decomp_partition", may_fail: bool = False, checks: bool = True):
    """Use the kernels of models/attention_kernels.py on the CPU, in all dtypes; yield the dtypes of flash calls.

    A failed self-check is an error, unless it ``may_fail``. FlexAttention is torch's own, compiled with ``backend``;
    without inductor it has a backward pass on CPUs, too, which takes minutes in bf16: without ``checks``, there is no
    self-check.
    """
    calls: list[torch.dtype] = []

    def counted(*args, **options):
        calls.append(args[0].dtype)
        return forward(*args, **options)

    compiled = attention_kernels._compiled_softcap(backend)
    with ExitStack() as stack:
        for target, name, value in (
            (attention_kernels, "FLASH_FORWARD", counted),
            (attention_kernels, "FLASH_BACKWARD", backward),
            (attention_kernels, "_compiled_softcap", lambda: compiled),
            (attention_dispatch, "DEVICES", ("cpu",)),
            (attention_dispatch, "DTYPES", (torch.bfloat16, torch.float32, torch.float64)),
            (flex_attention, "_validate_device", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        if not checks:
            stack.enter_context(mock.patch.object(attention_dispatch, "_passes", lambda case: True))
            yield calls
            return
        if not may_fail:
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("error", ".*attention masks are used")
        attention_dispatch._passes.cache_clear()
        stack.callback(attention_dispatch._passes.cache_clear)
        yield calls


@contextmanager
def newer_flash(installed: str, capability: int = 9, faults: dict[str, str] | None = None):
    """Install stand-ins of FlashAttention 3 and 4; yield the ones that were called, and whether rows were packed.

    A fault is "import", or what is wrong: "all", "packed", "sdpa", or "decoding" of one query per row.
    """
    faults = faults or {}
    called: set[tuple[str | None, bool]] = set()
    sdpa = attention.fused_attention

    def register(name: str):
        if faults.get(name) == "import":
            raise ImportError("undefined symbol")
        return SimpleNamespace(remove=lambda: None)

    def flash_forward(q, k, v, cu_seqlens, *args, **options):
        called.add((current_flash_attention_impl(), cu_seqlens is not None))
        fault = faults.get(current_flash_attention_impl())
        is_wrong = fault == "all" or (fault == "packed" and cu_seqlens is not None)
        out, *others = forward(q, k, v, cu_seqlens, *args, **options)
        return (2 * out if is_wrong else out), *others

    def fused_attention(q, k, v, mask, is_causal, scale):
        fault, is_reference = faults.get(current_flash_attention_impl()), torch.backends.cuda.math_sdp_enabled()
        is_wrong = not is_reference and (fault == "sdpa" or (fault == "decoding" and q.size(2) == 1))
        return (1 + is_wrong) * sdpa(q, k, v, mask, is_causal, scale)

    def discover(name: str) -> list[str]:
        return [name] if f"FA{name[-1]}" in installed else []

    with kernels_on_cpu(), ExitStack() as stack:
        for target, name, value in (
            (attention_kernels, "FLASH_FORWARD", flash_forward),
            (attention, "fused_attention", fused_attention),
            (attention_dispatch, "_failed", set()),
            (attention_dispatch.Distribution, "discover", discover),
            (torch.cuda, "get_device_capability", lambda device: (capability, 0)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        for name in ("FA3", "FA4"):
            register_flash_attention_impl(name, register_fn=lambda name=name: register(name))
        try:
            yield called
        finally:
            if current_flash_attention_impl() is not None:
                restore_flash_attention_impl()


def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *, scale, **window):
    """``aten::_flash_attention_forward``: (B, T, heads, width), or (tokens, heads, width) with cu_seqlens."""
    check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
    scores = scores_of(q, k, cu_q, cu_k, is_causal, scale, **window)
    lse = scores.logsumexp(-1)
    out = torch.einsum("...hqk,...khd->...qhd", (scores - lse[..., None]).exp(), repeated(v, q).to(scores.dtype))
    return out.to(q.dtype), lse, None, None, None


def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, is_causal, rng, unused, *, scale, **window):
    """``aten::_flash_attention_backward``: probabilities from the log-sum-exp, as Dao 2023 (arXiv 2307.08691)."""
    check(q, k, v, cu_q, cu_k, max_q, max_k, dropout)
    assert out.shape == grad.shape == q.shape and rng.dtype == torch.uint64
    scores = scores_of(q, k, cu_q, cu_k, is_causal, scale, **window)
    p, grad, q_, out = (scores - lse[..., None]).exp(), *(t.to(scores.dtype) for t in (grad, q, out))
    delta = (grad * out).sum(-1).transpose(-1, -2)[..., None]
    ds = scale * p * (torch.einsum("...qhd,...khd->...hqk", grad, repeated(v, q).to(p.dtype)) - delta)
    grad_q = torch.einsum("...hqk,...khd->...qhd", ds, repeated(k, q).to(p.dtype))
    grad_k, grad_v = (torch.einsum("...hqk,...qhd->...khd", a, b) for a, b in ((ds, q_), (p, grad)))
    grouped = [g.unflatten(-2, (k.size(-2), -1)).sum(-2) for g in (grad_k, grad_v)]
    return tuple(g.to(q.dtype) for g in (grad_q, *grouped))


def check(q, k, v, cu_q, cu_k, max_q, max_k, dropout):
    """What aten's operators demand."""
    assert q.dtype == k.dtype == v.dtype and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.size(-1) % 8 == 0 and q.size(-1) <= 256 and q.size(-2) % k.size(-2) == 0 and dropout == 0.0
    for tensor, bounds, longest in ((q, cu_q, max_q), (k, cu_k, max_k)):
        if bounds is None:
            assert tensor.dim() == 4 and longest == tensor.size(1)
        else:
            assert tensor.dim() == 3 and bounds.dtype == torch.int32 and bounds.is_contiguous()
            lengths = bounds.diff()
            assert bounds[0] == 0 and bounds[-1] == len(tensor) and lengths.min() >= 0 and lengths.max() <= longest
    if cu_q is not None:
        assert len(cu_q) == len(cu_k) and not (cu_q.diff() > cu_k.diff()).any()


def scores_of(q, k, cu_q, cu_k, is_causal, scale, *, window_size_left, window_size_right):
    """(..., heads, queries, keys), -inf where not visible. A document's last query is aligned with its last key."""
    places = []
    for tensor, bounds in ((q, cu_q), (k, cu_k)):
        at = torch.arange(tensor.size(-3))
        bounds = torch.tensor([0, len(at)]) if bounds is None else bounds.long()
        document = torch.bucketize(at, bounds[1:], right=True)
        places.append((document, at - bounds[1:][document]))  # negative: tokens to the end of the document
    (document, query), (document_of_key, key) = places
    mask = document[:, None] == document_of_key
    if is_causal or window_size_right == 0:
        mask &= key <= query[:, None]
    if window_size_left >= 0:
        mask &= key >= query[:, None] - window_size_left
    exact = torch.promote_types(q.dtype, torch.float32)
    return torch.einsum("...qhd,...khd->...hqk", q.to(exact), repeated(k, q).to(exact) * scale).masked_fill(
        ~mask, float("-inf")
    )


def repeated(x, q):
    return x.repeat_interleave(q.size(-2) // x.size(-2), -2)
