from __future__ import annotations

import pytest
import torch
from helpers.initialize import initialize
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models import loss as loss_module
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.loss import chunk_rows, head_loss

VOCAB, WIDTH, TOKENS = 160, 24, 50


@pytest.fixture(params=["one chunk", "chunks of 7", "ignored rows kept"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 7)
    if request.param == "ignored rows kept":  # as on an accelerator
        monkeypatch.setattr(loss_module, "_supervised_rows", lambda targets: None)


def inputs(dtype: torch.dtype = torch.float32, bias: bool = False, masked: str = "some"):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, TOKENS // 5, WIDTH, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=g).mul(0.5).to(dtype).requires_grad_()
    b = torch.randn(VOCAB, generator=g).to(dtype).requires_grad_() if bias else None
    labels = torch.randint(0, VOCAB, (5, TOKENS // 5), generator=g)
    if masked == "some":
        labels[torch.rand(labels.shape, generator=g) < 0.4] = -100
        labels[2] = -100
    elif masked == "all":
        labels[:] = -100
    return x, weight, b, labels


def reference(x, weight, bias, labels):
    """torch's cross-entropy on the full logits."""
    logits = F.linear(x, weight, bias).float()
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")


def gradients(loss, tensors):
    return torch.autograd.grad(loss / 13, [t for t in tensors if t is not None])


@pytest.mark.parametrize("masked", ["none", "some", "all"])
@pytest.mark.parametrize("bias", [False, True])
def test_loss_and_gradients_match_cross_entropy(bias, masked, chunks):
    x, weight, b, labels = inputs(bias=bias, masked=masked)
    actual, expected = head_loss(x, weight, b, labels), reference(x, weight, b, labels)
    assert actual.dtype == torch.float32 and actual.shape == ()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for a, e in zip(gradients(actual, (x, weight, b)), gradients(expected, (x, weight, b)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", ["none", "some"])
def test_soft_capped_logits_match_cross_entropy(masked, chunks):
    """Gemma 2's soft-capping, with a cap low enough to matter."""
    x, weight, b, labels = inputs(bias=True, masked=masked)
    logits = 0.7 * torch.tanh(F.linear(x, weight, b) / 0.7)
    expected = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    actual = head_loss(x, weight, b, labels, softcap=0.7)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    for a, e in zip(gradients(actual, (x, weight, b)), gradients(expected, (x, weight, b)), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
def test_bf16_error_is_at_most_that_of_cross_entropy(weights_dtype, chunks):
    """Under autocast with fp32 weights, and with bf16 weights; gradients have the dtype of their tensors."""
    exact = inputs(bias=True)
    expected = reference(*exact)
    expected_grads = gradients(expected, exact[:3])
    tensors = [t.detach().to(weights_dtype).requires_grad_() for t in exact[:3]]
    with torch.autocast("cpu", torch.bfloat16, enabled=weights_dtype == torch.float32):
        chunked, torch_value = head_loss(*tensors, exact[3]), reference(*tensors, exact[3])
    assert chunked.dtype == torch.float32
    assert (chunked - expected).abs() <= 1.5 * (torch_value - expected).abs() + 1e-3 * expected
    chunked_grads, torch_grads = gradients(chunked, tensors), gradients(torch_value, tensors)
    for a, b, e in zip(chunked_grads, torch_grads, expected_grads, strict=True):
        assert a.dtype == weights_dtype
        assert (a - e).norm() <= 1.5 * (b - e).norm() + 1e-6


def test_bf16_weight_gradient_keeps_small_chunks(monkeypatch):
    monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 1)
    many, (x, weight, _, labels) = {}, inputs(torch.bfloat16, masked="none")
    for rows in (1, TOKENS):
        monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", rows)
        (many[rows],) = torch.autograd.grad(head_loss(x, weight, None, labels), weight)
    error = (many[1].float() - many[TOKENS].float()).norm() / many[TOKENS].float().norm()
    assert error < 3e-3  # one rounding to 8 bits; fifty would give 1e-2


def test_only_needed_gradients_are_computed():
    x, weight, bias, labels = inputs(bias=True)
    weight.requires_grad_(False), bias.requires_grad_(False)  # a frozen head
    (chunked,), (torch_value,) = (torch.autograd.grad(f(x, weight, bias, labels), x) for f in (head_loss, reference))
    torch.testing.assert_close(chunked, torch_value, rtol=1e-5, atol=1e-6)
    x.requires_grad_(False), weight.requires_grad_(True)
    (chunked,), (torch_value,) = (
        torch.autograd.grad(f(x, weight, bias, labels), weight) for f in (head_loss, reference)
    )
    torch.testing.assert_close(chunked, torch_value, rtol=1e-5, atol=1e-6)
    with torch.no_grad(), _LargestTensors() as seen:
        plain = head_loss(x, weight, bias, labels)
    torch.testing.assert_close(plain, reference(x, weight, bias, labels))
    assert "aten.exp_.default" not in seen.ops and not plain.requires_grad


def test_second_backward_is_an_error():
    x, weight, _, labels = inputs()
    loss = head_loss(x, weight, None, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was already called"):
        loss.backward()


class _LargestTensors(TorchDispatchMode):
    """Records every operation and the number of elements of the largest tensor of each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[torch.dtype, int] = {}
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.ops.add(str(func))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest[t.dtype] = max(self.largest.get(t.dtype, 0), t.numel())
        return out


@pytest.mark.parametrize(
    ("training", "autocast"),
    [
        (True, True),
        (False, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False), (False, True))),
    ],
)
def test_m1_full_logits_are_never_materialized(training, autocast):
    """No tensor larger than one chunk, for all dtypes, forward and backward."""
    vocab = 50304
    model = GPT(ModelConfig(vocab_size=vocab, block_size=512, n_layer=1, n_embd=8, n_head=1, tie_embeddings=True))
    ids = torch.randint(0, vocab, (2, 384), generator=torch.Generator().manual_seed(0))
    rows = chunk_rows(vocab, torch.device("cpu"))
    assert rows * 2 < ids.numel()
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with _LargestTensors() as seen:
            loss, _ = model(ids, ids)
            if training:
                loss.backward()
    assert max(seen.largest.values()) <= rows * vocab
    with _LargestTensors() as control:  # control: the recorder detects full logits
        model(ids)
    assert control.largest[torch.float32] == ids.numel() * vocab


@pytest.mark.parametrize("tied", [False, True])
def test_model_loss_gradients_match_cross_entropy(tied, chunks):
    model = GPT(ModelConfig(vocab_size=VOCAB, block_size=32, n_embd=32, tie_embeddings=tied, lm_head_bias=not tied))
    initialize(model, 0)
    g = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(0, VOCAB, (2, 3, 20), generator=g).unbind()
    labels[1, 4:] = -100
    loss, n_tokens = model(ids, labels)
    assert n_tokens.dtype == torch.int64 and n_tokens.item() == (labels != -100).sum().item()
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    parameters = dict(model.named_parameters())
    chunked = torch.autograd.grad(loss, parameters.values())
    torch_value = torch.autograd.grad(expected, parameters.values())
    for name, a, b in zip(parameters, chunked, torch_value, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_match_cross_entropy_on_cuda(autocast, monkeypatch):
    monkeypatch.setattr(loss_module, "DEVICE_CHUNK_LOGITS", 7 * VOCAB)
    x, weight, b, labels = (t.detach().cuda() for t in inputs(bias=True))
    tensors = [t.requires_grad_() for t in (x, weight, b)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        actual, expected = head_loss(*tensors, labels), reference(*tensors, labels)
    tolerance = 2e-2 if autocast else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
    for chunked, torch_value in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
        assert (chunked - torch_value).norm() <= tolerance * torch_value.norm()
