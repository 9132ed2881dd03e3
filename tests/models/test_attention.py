"""Attention sinks: outputs and gradients match a reference implementation and transformers, for all masks."""

from types import SimpleNamespace

import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.attention import sink_attention
from toolkit.models.config import ModelConfig
from toolkit.models.init import draw
from toolkit.models.masks import AttentionMask, AttentionMaskBuilder

DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])
CASES = {
    "causal": (0, 9, None, None),
    "window": (0, 9, 4, None),
    "cached": (5, 4, None, None),
    "cached window": (5, 4, 3, None),
    "one query": (5, 1, None, None),
    "one query of a window": (5, 1, 3, None),
    "documents": (0, 9, None, DOCUMENTS),
    "documents in windows": (0, 9, 3, DOCUMENTS),
}


def inputs(n_new: int, n_keys: int, size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return q, k, v and sinks: two rows, four heads in two groups."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, n_new, size), (2, 2, n_keys, size), (2, 2, n_keys, size), (4,)
    return [torch.randn(shape, dtype=dtype, generator=generator, requires_grad=True) for shape in shapes]


def expected_mask(n_cached: int, n_new: int, window: int | None, documents: torch.Tensor | None) -> torch.Tensor:
    """The reference mask, (B, 1, n_new, n_cached + n_new)."""
    queries, at = torch.arange(n_cached, n_cached + n_new)[:, None], torch.arange(n_cached + n_new)
    mask = (at <= queries) & (at > queries - (window or n_cached + n_new))
    same = documents[:, :, None] == documents[:, None, :] if documents is not None else torch.ones(2, 1, 1).bool()
    return (mask & same)[:, None]


def reference_attention(q, k, v, mask, scale, sinks) -> torch.Tensor:
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    with_sinks = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return with_sinks.softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("size", [16, 20])
@pytest.mark.parametrize("case", CASES)
def test_sink_attention_and_gradients_match_reference(case, size):
    n_cached, n_new, window, documents = CASES[case]
    q, k, v, sinks = given = inputs(n_new, n_cached + n_new, size)
    attn_mask = AttentionMaskBuilder(n_cached, n_new, torch.device("cpu"), documents).for_window(window)
    found = sink_attention(q, k[:, :, -attn_mask.n_keys :], v[:, :, -attn_mask.n_keys :], attn_mask, 0.3, sinks)
    expected = reference_attention(q, k, v, expected_mask(*CASES[case]), 0.3, sinks)
    torch.testing.assert_close(found, expected)
    direction = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    gradients = [torch.autograd.grad((y * direction).sum(), given) for y in (found, expected)]
    for actual, reference in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, reference)


def test_extreme_sinks_take_all_or_no_attention():
    q, k, v, sinks = inputs(6, 6, 16)
    causal = AttentionMask(6, is_causal=True)
    assert sink_attention(q, k, v, causal, 0.3, sinks + 1e4).abs().max() == 0
    without = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(sink_attention(q, k, v, causal, 0.3, sinks - 1e4), without)


@torch.no_grad()
def test_bf16_error_is_at_most_that_of_transformers():
    reference = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss").eager_attention_forward
    q, k, v, sinks = inputs(64, 64, 24, torch.float32)
    mask, scale = torch.ones(64, 64).bool().tril(), 24**-0.5
    expected = reference_attention(3 * q, k, v, mask, scale, sinks)
    q, k, v, sinks = (tensor.bfloat16() for tensor in (3 * q, k, v, sinks))
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    hidden = torch.zeros(64, 64, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))
    hf_output = reference(module, q, k, v, hidden, scaling=scale)[0].transpose(1, 2)
    actual = sink_attention(q, k, v, AttentionMask(64, is_causal=True), scale, sinks)
    error = lambda found: (found.float() - expected).pow(2).mean().sqrt()  # noqa: E731
    assert actual.dtype == torch.bfloat16 and error(actual) <= error(hf_output)


def test_fp32_sinks_have_fp32_gradient_with_bf16_inputs():
    q, k, v, sinks = inputs(64, 64, 24, torch.float32)
    of = {}
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [tensor.to(dtype) for tensor in (q, k, v)]
        y = sink_attention(*rounded, AttentionMask(64, is_causal=True), 24**-0.5, sinks)
        of[dtype] = torch.autograd.grad(y.float().pow(2).sum(), sinks)[0]
    assert of[torch.bfloat16].dtype == torch.float32
    assert (of[torch.bfloat16] - of[torch.float32]).norm() < 0.01 * of[torch.float32].norm()


def test_sink_initialization_matches_transformers():
    sinks = draw("transformer.h.0.attn.sinks", (4096,), seed=0, config=ModelConfig(attention_sinks=True))
    assert sinks.std().item() == pytest.approx(0.02, rel=0.1) and sinks.mean().abs() < 0.002


def test_sinks_with_softcapping_are_rejected():
    with pytest.raises(UserError, match="--model_config.attention_sinks true"):
        ModelConfig(attention_sinks=True, attention_logit_softcapping=30.0)
