"""The gated delta rule and the convolution match recurrences and transformers, and keep documents apart."""

import importlib.machinery
import sys
import time
import types
import warnings
from statistics import median

import pytest
import torch
from torch.nn import functional as F

from toolkit.models import gated_delta, gated_delta_fla
from toolkit.models.gated_delta import causal_conv, gated_delta_rule

KEY_HEADS, VALUE_HEADS, KEY, VALUE, CHANNELS, CONV = 2, 4, 12, 10, 6, 4
PACKED = (0, 1, 2, 3, 70, 127, 128, 150, 192, 260)
"""Starts of documents in a row of 261 tokens: of 1 token, several in a chunk, and at the borders of chunks of 64."""


def make_inputs(T: int, dtype: torch.dtype = torch.float64, B: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    shapes = [(KEY_HEADS, KEY), (KEY_HEADS, KEY), (VALUE_HEADS, VALUE), (VALUE_HEADS,), (VALUE_HEADS,)]
    q, k, v, log_decay, beta = (torch.randn(B, T, *s, generator=generator, dtype=torch.float64) for s in shapes)
    k = k + torch.randn(B, 1, KEY_HEADS, KEY, generator=generator, dtype=torch.float64)  # similar keys overwrite
    state = torch.randn(B, VALUE_HEADS, KEY, VALUE, generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, -0.3 * F.softplus(4 * log_decay), beta.sigmoid(), state)]


def starts_at(positions, T: int, B: int = 2) -> torch.Tensor:
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[:, [p for p in positions if p < T]] = True
    return starts


def recurrence(q, k, v, log_decay, beta, state, starts=None):
    """The rule token by token, as the paper states it."""
    repeats = v.size(2) // k.size(2)
    q, k = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, 2) for x in (q, k))
    outputs = []
    for t in range(v.size(1)):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], 0.0, state)
        state = state * log_decay[:, t, :, None, None].exp()
        delta = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], delta)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.size(-1) ** -0.5)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("T", [1, 5, 64, 261])
@pytest.mark.parametrize("is_packed", [False, True])
def test_matches_recurrence_in_fp64(T: int, is_packed: bool) -> None:
    *inputs, state = make_inputs(T)
    starts = starts_at(PACKED if T == 1 else PACKED[1:], T) if is_packed else None
    if is_packed:
        starts[1] = False  # one row of two is packed
    for given in (state, None):
        expected = recurrence(*inputs, torch.zeros_like(state) if given is None else given, starts)
        torch.testing.assert_close(gated_delta_rule(*inputs, given, starts), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1.0, 30.0])  # of the log decay: exp underflows
def test_rounds_like_transformers_in_fp32(scale: float) -> None:
    rules = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    *inputs, state = make_inputs(200, torch.float32)
    inputs[3] = scale * inputs[3]
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    chunked = rules.torch_chunk_gated_delta_rule(*inputs, **options)
    recurrent = rules.torch_recurrent_gated_delta_rule(*inputs, **options)
    for actual, a, b in zip(gated_delta_rule(*inputs, state), chunked, recurrent, strict=True):
        for expected in (a, b):
            assert (actual - expected).abs().max() <= 2 * (a - b).abs().max()


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients(is_packed: bool) -> None:
    inputs = [x.requires_grad_() for x in make_inputs(11, B=1)]
    starts = starts_at((3, 4, 8), 11, B=1) if is_packed else None

    def rule(*inputs):
        return gated_delta_rule(*inputs, starts, chunk_size=4)

    assert torch.autograd.gradcheck(rule, inputs, fast_mode=True)
    single = [x[:, :1].detach().requires_grad_() for x in inputs[:5]]
    assert torch.autograd.gradcheck(gated_delta_rule, (*single, inputs[5]), fast_mode=True)
    *_, x, weight, window = conv_inputs(11)
    inputs = [x.requires_grad_() for x in (x, weight, window)]
    assert torch.autograd.gradcheck(lambda *inputs: causal_conv(*inputs, starts), inputs, fast_mode=True)


def conv_inputs(T: int, dtype: torch.dtype = torch.float64, B: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(T)
    shapes = (B, T, CHANNELS), (CHANNELS, CONV), (B, CONV - 1, CHANNELS)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def test_convolution_matches_conv1d_and_keeps_the_window() -> None:
    x, weight, window = conv_inputs(9, B=2)
    full = torch.cat((window, x), dim=1)
    expected = F.silu(F.conv1d(full.mT, weight[:, None], groups=CHANNELS)).mT
    y, last = causal_conv(x, weight, window)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    assert torch.equal(last, full[:, -3:])
    outputs, part = [], window
    for size, begin in ((5, 0), (1, 5), (2, 6), (1, 8)):  # fewer tokens than the window holds
        y, part = causal_conv(x[:, begin : begin + size], weight, part)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, dim=1), expected, rtol=0, atol=1e-12)
    assert torch.equal(part, last)


def test_documents_equal_each_alone() -> None:
    T = 261
    *inputs, state = make_inputs(T, torch.float32)
    x, weight, window = conv_inputs(T, torch.float32, B=2)
    starts = starts_at(PACKED, T)
    y, last = gated_delta_rule(*inputs, state, starts)
    convolved, last_window = causal_conv(x, weight, window, starts)
    for begin, end in zip(PACKED, (*PACKED[1:], T), strict=True):
        alone, state = gated_delta_rule(*(each[:, begin:end] for each in inputs))
        torch.testing.assert_close(y[:, begin:end], alone, rtol=0, atol=1e-6)
        alone, window = causal_conv(x[:, begin:end], weight)
        torch.testing.assert_close(convolved[:, begin:end], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(last, state, rtol=0, atol=1e-6)
    assert torch.equal(last_window, window)


@pytest.mark.parametrize("changed", [(0, 70), (127, 128), (150, 192), (192, 261)])
@pytest.mark.parametrize("factor", [-1.5, 1e25])
def test_n9_a_document_changes_no_bit_of_others(changed: tuple[int, int], factor: float) -> None:
    T, inside = 261, slice(*changed)
    starts = starts_at(PACKED, T)

    def run(change: float) -> list[torch.Tensor]:
        inputs = make_inputs(T, torch.float32)
        for i, x in enumerate((*inputs[:3], *([] if change == 1 else inputs[3:5]))):
            x[:, inside] *= abs(change) if i == 3 else 0.9 if i == 4 else change
        x, weight, window = conv_inputs(T, torch.float32, B=2)
        x[:, inside] *= change
        leaves = [each.requires_grad_() for each in (*inputs, x, window)]
        y = gated_delta_rule(*inputs, starts)[0], causal_conv(x, weight, window, starts)[0]
        directions = [torch.cos(torch.arange(each.numel()).view(each.shape).float()) for each in y]
        gradients = torch.autograd.grad(y, leaves, directions)
        assert all(g.isfinite().all() for g in gradients[:2])
        per_token = [*y, *(g for g in gradients if g.size(1) == T)]
        return [torch.cat((each[:, : changed[0]], each[:, changed[1] :]), dim=1) for each in per_token]

    for before, after in zip(run(1.0), run(factor), strict=True):
        assert before.isfinite().all() and torch.equal(before, after)


def test_extreme_decays_and_betas_are_finite() -> None:
    for log_decay in (0.0, -1e4, float("-inf")):
        for beta in (0.0, 1.0):
            *inputs, state = make_inputs(130, torch.float32)
            inputs[3][:, 3:100:2], inputs[4][:] = log_decay, beta
            leaves = [x.requires_grad_() for x in (*inputs, state)]
            outputs = gated_delta_rule(*leaves, starts_at((40,), 130))
            gradients = torch.autograd.grad(sum(x.sum() for x in outputs), leaves)
            assert all(x.isfinite().all() for x in (*outputs, *gradients))


@pytest.mark.slow
def test_compiles() -> None:
    """One graph serves all lengths, packed or not, and autocast rounds no product of the rule."""
    from torch._dynamo.utils import counters

    def layer(x, weight, a, b, starts):
        y, _ = causal_conv(x @ a, weight, None, starts)
        q, k, v, log_decay, beta = y.split((16, 16, 24, 2, 2), dim=-1)
        q, k, v = (each.unflatten(-1, (2, -1)) for each in (q, k, v))
        return gated_delta_rule(q, k, v, -log_decay.float().exp(), beta.sigmoid(), starts=starts)[0].flatten(2) @ b

    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(s, generator=generator).requires_grad_() for s in ((60, 4), (8, 60), (24, 8))]
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for is_rounded in (False, True):
        for T in (100, 77, 333):
            x, starts = torch.randn(2, T, 8, generator=generator), starts_at(PACKED, T)
            results = []
            for run in (layer, compiled):
                with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
                    y = run(x, *weights, starts)
                results.append((y, *torch.autograd.grad(y.float().square().mean(), weights)))
            for actual, expected in zip(*results, strict=True):
                assert (actual - expected).norm() <= (2e-2 if is_rounded else 1e-5) * expected.norm()
    assert counters["stats"]["unique_graphs"] <= 4
    *inputs, state = make_inputs(70, torch.bfloat16)
    plain = gated_delta_rule(*inputs, state)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, gated_delta_rule(*inputs, state), plain))
    torch.library.opcheck(torch.ops.toolkit.gated_delta_rule.default, (*make_inputs(70), starts_at(PACKED, 70), 64))


class FlaRule(torch.autograd.Function):
    """Stands for flash-linear-attention's kernel: rows of equal lengths, or one row with documents' bounds."""

    @staticmethod
    def forward(ctx, bounds, factor, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.bounds, ctx.factor = bounds, factor
        y, states = FlaRule.compute(bounds, *inputs)
        return factor * y, states

    @staticmethod
    def compute(bounds, *inputs):
        *inputs, state = inputs
        if bounds is None:
            return gated_delta._outputs(*inputs, state, None)
        assert inputs[0].size(0) == 1 and bounds[-1] == inputs[0].size(1)
        parts = [[x[:, i:j] for x in inputs] for i, j in zip(bounds[:-1], bounds[1:], strict=True)]
        outputs, states = zip(*(gated_delta._outputs(*part, None, None) for part in parts), strict=True)
        return torch.cat(outputs, dim=1), torch.cat(states)

    @staticmethod
    def backward(ctx, grad, grad_states):
        *inputs, state = ctx.saved_tensors
        if ctx.bounds is None:
            found = gated_delta._gradients(grad, grad_states, *inputs, state, None)
            return None, None, *found[:5], None if state is None else found[5]
        found, ends = [], zip(ctx.bounds[:-1], ctx.bounds[1:], grad_states.split(1), strict=True)
        for i, j, grad_state in ends:
            part = [x[:, i:j] for x in inputs]
            found.append(gated_delta._gradients(grad[:, i:j], grad_state, *part, None, None)[:5])
        return None, None, *(torch.cat(parts, dim=1) for parts in zip(*found, strict=True)), None


@pytest.mark.parametrize("factor", [1.0, 1.1, None])
def test_flash_linear_attention_is_used_if_it_is_right(factor, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
        assert q.dtype == torch.bfloat16 and q.shape[:3] == v.shape[:3] and output_final_state
        calls.append(cu_seqlens)
        return FlaRule.apply(cu_seqlens, factor, q, k, v, g, beta, initial_state)

    calls = []
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module if factor else None)
        module.chunk_gated_delta_rule = rule
    gated_delta_fla._passes.cache_clear()
    message = "not installed" if factor is None else "relative error" if factor > 1 else ""
    with warnings.catch_warnings() if factor == 1 else pytest.warns(match=message):
        warnings.simplefilter("error" if factor == 1 else "always")
        for is_packed in (True, False):
            *inputs, state = make_inputs(150, torch.bfloat16)
            inputs[3:], state = [x.float() for x in inputs[3:]], None if is_packed else state.float()
            leaves = [x.requires_grad_() for x in (*inputs, *([] if is_packed else [state]))]
            starts = starts_at(PACKED, 150) if is_packed else None
            calls.clear()
            results = []
            for devices in (("cpu",), ()):
                monkeypatch.setattr(gated_delta_fla, "DEVICES", devices)
                outputs = gated_delta_rule(*inputs, state, starts)
                results.append((*outputs, *torch.autograd.grad([x.float().sum() for x in outputs], leaves)))
            for actual, expected in zip(*results, strict=True):
                assert (actual - expected).float().norm() <= 1e-2 * expected.float().norm()
            assert len(calls) == (2 if factor == 1 else 0) + (4 if factor and is_packed else 0)
    gated_delta_fla._passes.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", gated_delta_fla.DTYPES)
def test_flash_linear_attention_matches_torch_on_cuda(dtype: torch.dtype) -> None:
    pytest.importorskip("fla", reason="needs flash-linear-attention")
    forms, device = (gated_delta._outputs, gated_delta._gradients), torch.device("cuda", torch.cuda.current_device())
    assert gated_delta_fla._largest_error(device, dtype, 128, 128, *forms) < 0.01


@pytest.mark.slow
def test_a_packed_row_costs_at_most_a_third_more_than_one_document() -> None:
    """CPU time of convolution and rule, forward and backward, measured in turns."""
    T, seconds = 2048, {False: [], True: []}
    *inputs, _ = make_inputs(T, torch.float32, B=1)
    x, weight, _ = conv_inputs(T, torch.float32)
    x, weight = x.repeat(1, 1, 20).requires_grad_(), weight.repeat(20, 1).requires_grad_()
    leaves = [*(each.requires_grad_() for each in inputs), x, weight]
    for _ in range(7):
        for is_packed, found in seconds.items():
            starts = starts_at(range(0, T, T // 8), T, B=1) if is_packed else None
            begin = time.process_time()
            y = gated_delta_rule(*inputs, starts=starts)[0].sum() + causal_conv(x, weight, None, starts)[0].sum()
            torch.autograd.grad(y, leaves)
            found.append(time.process_time() - begin)
    assert median(seconds[True]) <= 1.3 * median(seconds[False])
