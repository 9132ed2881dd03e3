import itertools
import warnings

import pytest
import torch
from helpers.initialize import initialize
from torch._inductor import metrics
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models import cross_entropy, mixed_mm
from toolkit.models import loss as loss_module
from toolkit.models.config import ModelConfig
from toolkit.models.cross_entropy import cross_entropy_
from toolkit.models.gpt import GPT
from toolkit.models.loss import _chunks, chunk_rows, head_loss

VOCAB, WIDTH, TOKENS = 160, 24, 50


@pytest.fixture(params=["one chunk", "chunks of 7", "ignored rows kept"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 7)
    if request.param == "ignored rows kept":  # as on an accelerator
        monkeypatch.setattr(loss_module, "_supervised_rows", lambda targets: (None, targets == -100))


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


@pytest.mark.parametrize("masked", ["none", "some", "all"])
def test_log_probs_and_gradients_match_log_softmax(masked, chunks):
    """With a different gradient for each token, and adapters of the head."""
    x, weight, bias, labels = inputs(bias=True, masked=masked)
    low_rank = torch.randn(5, TOKENS // 5, 3, requires_grad=True), torch.randn(VOCAB, 3, requires_grad=True)
    scale = torch.randn(labels.shape)
    for cap, parts in ((None, None), (0.7, low_rank)):
        logits = F.linear(x, weight, bias) + (0 if parts is None else parts[0] @ parts[1].T)
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        at = labels.clamp(0)[..., None]
        expected = logits.log_softmax(-1).gather(-1, at)[..., 0].masked_fill(labels == -100, 0)
        actual = head_loss(x, weight, bias, labels, parts, cap, log_probs=True)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        tensors = (x, weight, bias, *(parts or ()))
        found, known = (torch.autograd.grad((value * scale).sum(), tensors) for value in (actual, expected))
        for a, e in zip(found, known, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)


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
    assert "aten.scatter_.src" not in seen.ops and not plain.requires_grad


def test_second_backward_is_an_error():
    x, weight, _, labels = inputs()
    loss = head_loss(x, weight, None, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was already called"):
        loss.backward()


def test_reusable_loss_gives_each_backward_pass_its_own_gradients():
    """As zero-bubble schedules need: first the gradient of the input, later the weight's."""
    x, weight, _, labels = inputs()
    expected = gradients(reference(x, weight, None, labels), [x, weight])
    loss = head_loss(x, weight, None, labels, reusable=True) / 13
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    for gradient, value in zip((first, second), expected, strict=True):
        torch.testing.assert_close(gradient, value, rtol=1e-5, atol=1e-6)


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
        (True, False),
        (False, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, True), (False, False))),
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
            for options in ({}, {"log_probs": True}):
                loss, _ = model(ids, ids, **options)
                if training:
                    loss.sum().backward()
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


def logits_of(rows: int, scale: float = 1.0):
    g = torch.Generator().manual_seed(0)
    logits, bias = scale * torch.randn(rows, VOCAB, generator=g), torch.randn(VOCAB, generator=g)
    targets = torch.randint(0, VOCAB, (rows,), generator=g)
    return logits, targets, torch.arange(rows) % 3 == 1, bias


def test_all_forms_of_the_cross_entropy_agree(monkeypatch):
    """The accelerators' form and the one that is compiled, with bias, soft-capping and ignored rows."""
    logits, targets, ignored, bias = logits_of(12)
    for b, softcap, dtype in itertools.product((None, bias), (None, 0.7), (torch.float32, torch.bfloat16)):
        arguments = targets, ignored, b, softcap, dtype
        losses, grad = cross_entropy_(logits.clone(), *arguments)
        with monkeypatch.context() as patch:
            patch.setattr(cross_entropy, "_loss_and_grad_single_exp_", cross_entropy._loss_and_grad_)
            on_accelerators = cross_entropy_(logits.clone(), *arguments)
        for other_losses, other_grad in (on_accelerators, cross_entropy.pointwise_cross_entropy(logits, *arguments)):
            torch.testing.assert_close(other_losses, losses, rtol=1e-6, atol=1e-6)
            # bf16: one rounding may go the other way
            tolerance = 1e-5 if dtype == torch.float32 else 8e-3
            torch.testing.assert_close(other_grad, grad, rtol=tolerance, atol=1e-7)
        assert not losses[ignored].any() and not grad[ignored].any()


def test_losses_beyond_the_range_of_probabilities_are_exact():
    """A target's probability below 1e-38 is zero in fp32."""
    x, weight, b, labels = inputs(bias=True)
    x = (40 * x).detach().requires_grad_()
    for softcap in (None, 60.0):
        logits = F.linear(x, weight, b)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
        assert expected > 100 * (labels != -100).sum() if softcap is None else 60 * (labels != -100).sum()
        actual = head_loss(x, weight, b, labels, softcap=softcap)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
        for a, e in zip(gradients(actual, (x, weight, b)), gradients(expected, (x, weight, b)), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


class _CountLaunches(TorchDispatchMode):
    """Counts the operations that are not views: on CUDA each is a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in str(func):
            self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_chunk_is_at_most_eight_launches_on_cuda(monkeypatch):
    """Meta tensors take CUDA's path; with a bias, bf16 weights or autocast. The loss kernel counts as two, losses and
    gradient, as torch.compile's; Triton's is one. On the meta device addmm_fp32_ needs one launch more."""

    def kernel(logits, targets, ignored, bias, softcap, dtype, padding):
        return logits.sum(1), logits.to(dtype)

    monkeypatch.setattr(loss_module, "choose_cross_entropy", lambda *_: kernel)
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 10)
    monkeypatch.setattr(mixed_mm, "_has_fp32_results", lambda a: True)
    counts = {}
    for dtype, rows in itertools.product((torch.float32, torch.bfloat16), (20, 30)):
        x, weight, bias = (torch.empty(*n, device="meta", dtype=dtype) for n in ((rows, 8), (64, 8), (64,)))
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        with _CountLaunches() as seen:
            loss_module._losses_and_grads(labels, torch.bfloat16, [True] * 3, None, True, None, bias, x, weight)
        counts[dtype, rows] = len(seen.ops)
        assert "aten.mm.dtype_out" in seen.ops  # no rounding of the logits
    for dtype in (torch.float32, torch.bfloat16):
        assert counts[dtype, 30] - counts[dtype, 20] <= 8


@pytest.mark.slow
def test_compiled_kernel():
    """Compiled for the CPU: the same values, with padding as well."""
    logits, targets, ignored, bias = logits_of(12)
    targets.clamp_(max=VOCAB - 4)
    kernels = set()
    for arguments in ((ignored, bias, 0.7, torch.bfloat16), (ignored, bias, 0.7, torch.bfloat16, 3)):
        torch.compiler.reset()
        metrics.reset()
        losses, grad = torch.compile(cross_entropy.pointwise_cross_entropy)(logits, targets, *arguments)
        expected_losses, expected = cross_entropy_(logits.clone(), targets, *arguments)
        torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad, expected, rtol=8e-3, atol=1e-7)
        kernels.add(metrics.generated_kernel_count)
    assert len(kernels) == 1  # padded columns take no kernel


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch):
    """Triton's is tried first, then torch.compile's. A kernel that hides a NaN differs (N7).

    The bias of the check has the dtype of the run's.
    """

    def fails(*_):
        raise RuntimeError("no compiler\nand a long story")

    def differs(logits, *arguments):
        losses, grad = cross_entropy_(logits.clone(), *arguments)
        return losses, 1.1 * grad

    def hides_nan(logits, *arguments):
        return [part.nan_to_num(0.0) for part in cross_entropy_(logits.clone(), *arguments)]

    def needs_fp32_bias(logits, targets, ignored, bias, *rest):
        assert bias.dtype == torch.float32
        return cross_entropy_(logits.clone(), targets, ignored, bias, *rest)

    good = cross_entropy.pointwise_cross_entropy
    cases = {(good, fails): [], (fails, good): ["Triton"], (hides_nan, good): ["Triton"]}
    cases[needs_fp32_bias, good] = ["Triton"]
    for kernels, failing in (cases | {(differs, fails): ["Triton", "compiled"]}).items():
        cross_entropy._checked_kernel.cache_clear()
        for name, kernel in zip(("triton_kernel", "compiled_kernel"), kernels, strict=True):
            monkeypatch.setattr(cross_entropy, name, lambda kernel=kernel: kernel)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = cross_entropy._checked_kernel(torch.device("cpu"), VOCAB, torch.bfloat16, 0.7, torch.bfloat16, 3)
        assert chosen is (good if good in kernels else cross_entropy_)
        texts = [str(warning.message) for warning in caught]
        assert [text.partition(" loss kernel fails its check: ")[0] for text in texts] == [f"the {n}" for n in failing]
        assert not any("\n" in text for text in texts)
    cross_entropy._checked_kernel.cache_clear()


def test_comparisons_and_log_probabilities_without_gradient_use_no_kernel(monkeypatch):
    """Kernels compute a gradient. A RowLoss has its own function; log-probabilities get a gradient in backward."""
    calls = []

    def choose(*_):
        calls.append("kernel")
        return cross_entropy_

    monkeypatch.setattr(loss_module, "choose_cross_entropy", choose)
    x, weight, b, labels = inputs(bias=True)
    head_loss(x, weight, b, labels, compiled=Rows()).backward()
    log_probs = head_loss(x, weight, b, labels, compiled=True, log_probs=True)
    assert not calls
    log_probs.sum().backward()
    head_loss(x, weight, b, labels, compiled=True)
    assert len(calls) == 2


class Rows(loss_module.RowLoss):
    def start(self, dtype, supervised, ignored):
        return cross_entropy_


def test_products_with_fp32_results_are_checked():
    """The CPU has none: the check says so, in one line."""
    with pytest.warns(UserWarning, match="rounded to 16 bits: .*out_dtype|rounded to 16 bits: Could not run") as caught:
        assert not mixed_mm._check_fp32_results(torch.device("cpu"), torch.bfloat16)
    assert "\n" not in str(caught[0].message)


def test_chunks_are_equal_and_cover_all_rows():
    for n, largest in ((0, 5), (1, 5), (5, 5), (11, 5), (1024, 333)):
        chunks = _chunks(n, largest)
        sizes = [c.stop - c.start for c in chunks]
        assert sum(sizes) == n and [c.start for c in chunks[1:]] == [c.stop for c in chunks[:-1]]
        assert max(sizes, default=0) <= largest and len(chunks) == -(-n // largest)
    assert chunk_rows(50304, torch.device("cuda")) == 4096 and chunk_rows(256000, torch.device("cuda")) == 1048


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_compiled_loss_on_cuda(monkeypatch):
    """The checks of both kernels pass, and chunks give the gradients of the CPU in fp32."""
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 7)
    exact, triton_kernel = inputs(bias=True), cross_entropy.triton_kernel
    for load, softcap in itertools.product((triton_kernel, cross_entropy.compiled_kernel), (None, 0.7)):
        monkeypatch.setattr(cross_entropy, "triton_kernel", load)
        cross_entropy._checked_kernel.cache_clear()
        logits = F.linear(*exact[:3])
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        expected = F.cross_entropy(logits.flatten(0, -2), exact[3].flatten(), ignore_index=-100, reduction="sum")
        tensors = [t.detach().cuda().bfloat16().requires_grad_() for t in exact[:3]]
        torch.compiler.reset()
        metrics.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            actual = head_loss(*tensors, exact[3].cuda(), softcap=softcap, compiled=True)
        # by torch.compile: two for the rows of the check, two for the chunks
        assert metrics.generated_kernel_count <= (0 if load is triton_kernel else 4)
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-2, atol=0)
        for a, e in zip(gradients(actual, tensors), gradients(expected, exact[:3]), strict=True):
            assert (a.cpu().float() - e).norm() <= 2e-2 * e.norm()
    cross_entropy._checked_kernel.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("autocast", [False, True])
def test_loss_and_gradients_match_cross_entropy_on_cuda(autocast, monkeypatch):
    monkeypatch.setattr(loss_module, "chunk_rows", lambda *_: 7)
    x, weight, b, labels = (t.detach().cuda() for t in inputs(bias=True))
    tensors = [t.requires_grad_() for t in (x, weight, b)]
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        actual, expected = head_loss(*tensors, labels), reference(*tensors, labels)
    tolerance = 2e-2 if autocast else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=0)
    for chunked, torch_value in zip(gradients(actual, tensors), gradients(expected, tensors), strict=True):
        assert (chunked - torch_value).norm() <= tolerance * torch_value.norm()


def test_losses_are_fp32_whatever_the_default_dtype():
    """Under bf16-true, Fabric makes bf16 the default dtype during the forward pass."""
    x, weight, bias, labels = inputs(torch.bfloat16)
    expected = head_loss(x, weight, bias, labels)
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = head_loss(x, weight, bias, labels)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32 and torch.equal(loss, expected)
