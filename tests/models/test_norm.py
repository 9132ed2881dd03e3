"""Norms of 16-bit inputs with fp32 weights, as QK-norm has under autocast."""

import warnings
from dataclasses import replace

import pytest
import torch

from toolkit.models.families import get_config
from toolkit.models.norm import LayerNormPerHead, OffsetRMSNorm, make_norm

SIZE = 64


def make_norms() -> dict[str, torch.nn.Module]:
    config = get_config("pico-llama")
    changes = {"RMSNorm": {}, "OffsetRMSNorm": {"norm_offset": True}, "LayerNorm": {"norm_class_name": "LayerNorm"}}
    norms = {name: make_norm(replace(config, **change), SIZE) for name, change in changes.items()}
    norms["LayerNormPerHead"] = LayerNormPerHead(4, SIZE // 4, 1e-5)
    for norm in norms.values():
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter, 1.0, 0.3, generator=torch.Generator().manual_seed(1))
    return norms


def exact(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The norm in fp64."""
    x, weight = x.double(), norm.weight.double()
    groups = x.unflatten(-1, (getattr(norm, "heads", 1), -1))
    if isinstance(norm, torch.nn.LayerNorm):
        groups = groups - groups.mean(-1, keepdim=True)
    y = (groups / (groups.square().mean(-1, keepdim=True) + norm.eps).sqrt()).flatten(-2)
    bias = getattr(norm, "bias", None)
    return y * (weight + isinstance(norm, OffsetRMSNorm)) + (0 if bias is None else bias.double())


@pytest.fixture
def every_warning():
    """torch shows some warnings only once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    torch.set_warn_always(before)


@pytest.mark.parametrize("name", make_norms())
def test_norms_of_16_bits_are_fused_and_rounded_once(name, every_warning):
    """Before its fused kernel torch compares the dtypes of input and weight: a difference is a warning."""
    norm, x = (
        make_norms()[name],
        torch.randn(256, SIZE, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),
    )
    for has_autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            y = norm(x)
        expected = exact(norm, x)
        assert y.dtype == torch.bfloat16
        assert ((y - expected).abs() <= 2**-8 * 1.001 * expected.abs() + 1e-6).all()  # half a unit in the last place


def test_norms_of_a_bf16_residual_stream_round_weight_and_bias_too():
    x = torch.randn(256, SIZE, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    for name in ("RMSNorm", "OffsetRMSNorm", "LayerNorm"):
        norm = make_norms()[name]
        norm.is_residual_norm = True
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(x)
        expected, bias = exact(norm, x), getattr(norm, "bias", None)
        bias = torch.zeros(SIZE) if bias is None else bias
        rounded = expected.abs() + bias.abs() + (expected - bias).abs()
        assert y.dtype == torch.bfloat16, name
        assert ((y - expected).abs() <= 2**-8 * 1.01 * rounded + 1e-6).all(), name
