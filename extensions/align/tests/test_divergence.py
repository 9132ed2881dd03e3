"""The divergence from a teacher, against plain fp64 and TRL's formula, and without logits of a batch (M1)."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers.initialize import initialize
from toolkit_align import divergence
from toolkit_align.divergence import DistillationLoss, DistillationOptions
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models import loss as loss_module
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT, Targets
from toolkit.models.loss import chunk_rows, head_loss

VOCAB, ROWS = 70, (3, 11)
DIVERGENCES = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1)]


@pytest.fixture(params=["one chunk", "chunks of 7 and 3", "ignored rows kept"])
def chunks(request, monkeypatch):
    if request.param != "one chunk":
        monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 7)
        monkeypatch.setattr(divergence, "chunk_rows", lambda *_: 3)
    if request.param == "ignored rows kept":  # as on an accelerator
        monkeypatch.setattr(loss_module, "_supervised_rows", lambda targets: (None, targets == -100))


class Heads:
    """A student's and a teacher's head with different widths and padding, adapters of the student, and labels."""

    def __init__(self, padded: int, teacher_padded: int, bias: bool = False) -> None:
        g = torch.Generator().manual_seed(0)
        self.x = torch.randn(*ROWS, 24, generator=g).requires_grad_()
        self.weight = torch.randn(padded, 24, generator=g).mul(0.5).requires_grad_()
        self.bias = torch.randn(padded, generator=g).requires_grad_() if bias else None
        self.low_rank = [torch.randn(*n, 2, generator=g).mul(0.3).requires_grad_() for n in (ROWS, (padded,))]
        self.hidden = torch.randn(*ROWS, 16, generator=g)
        self.teacher = torch.randn(teacher_padded, 16, generator=g)
        self.teacher_bias = torch.randn(teacher_padded, generator=g) if bias else None
        self.labels = torch.randint(0, VOCAB, ROWS, generator=g)
        self.labels[torch.rand(ROWS, generator=g) < 0.4] = -100
        self.labels[2] = -100

    def loss(self, options: DistillationOptions, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        head = lambda: (self.teacher, self.teacher_bias)  # noqa: E731
        loss = DistillationLoss(options, self.hidden, head, softcap, VOCAB)
        total = head_loss(self.x, self.weight, self.bias, self.labels, tuple(self.low_rank), softcap, loss)
        return total, loss.sums

    def expected(self, options: DistillationOptions, softcap: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The formulas on complete logits in fp64."""
        name, beta, temperature, label_weight = options

        def cap(logits):
            return logits if softcap is None else softcap * torch.tanh(logits / softcap)

        def double(tensor):
            return None if tensor is None else tensor.double()

        z = F.linear(self.x.double(), self.weight.double(), double(self.bias))
        z = cap(z + self.low_rank[0].double() @ self.low_rank[1].double().T)
        t = cap(F.linear(self.hidden.double(), self.teacher.double(), double(self.teacher_bias)))[..., :VOCAB]
        t = torch.cat([t, t.amin(-1, keepdim=True).expand(*t.shape[:-1], z.size(-1) - VOCAB)], -1)
        p, q = (z / temperature).softmax(-1), (t / temperature).softmax(-1)
        m = beta * q + (1 - beta) * p
        divergence = (
            {
                "forward_kl": q * (q / p).log(),
                "reverse_kl": p * (p / q).log(),
                "jsd": beta * q * (q / m).log() + (1 - beta) * p * (p / m).log(),
            }[name]
            .sum(-1)[self.labels != -100]
            .sum()
        )
        label = F.cross_entropy(z.flatten(0, 1), self.labels.flatten(), reduction="sum")
        total = (1 - label_weight) * temperature**2 * divergence + label_weight * label
        return total, torch.stack([divergence, label])

    def gradients(self, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = [t for t in (self.x, self.weight, self.bias, *self.low_rank) if t is not None]
        return torch.autograd.grad(loss / 13, tensors)


@pytest.mark.parametrize(("divergence", "beta"), DIVERGENCES)
def test_n2_loss_and_gradients_match_fp64_in_every_split_into_chunks(divergence, beta, chunks):
    for (temperature, label_weight), softcap, sizes in itertools.product(
        ((1.0, 0.0), (2.5, 0.3)), (None, 3.0), ((VOCAB, VOCAB), (80, 72))
    ):
        heads = Heads(*sizes, bias=softcap is not None)
        options = DistillationOptions(divergence, beta, temperature, label_weight)
        (total, sums), (expected, expected_sums) = heads.loss(options, softcap), heads.expected(options, softcap)
        torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=0)
        torch.testing.assert_close(sums.double(), expected_sums, rtol=2e-6, atol=0)
        for actual, gradient in zip(heads.gradients(total), heads.gradients(expected), strict=True):
            assert (actual - gradient).norm() <= 3e-6 * gradient.norm()
        with torch.no_grad():
            assert torch.equal(heads.loss(options, softcap)[1], sums)


def test_formulas_are_those_of_trl():
    """GKDTrainer.generalized_jsd_loss of TRL 1.16, which does not multiply by T^2."""

    def generalized_jsd_loss(student_logits, teacher_logits, labels, beta, temperature):
        student = F.log_softmax(student_logits / temperature, dim=-1)
        teacher = F.log_softmax(teacher_logits / temperature, dim=-1)
        if beta == 0:
            jsd = F.kl_div(student, teacher, reduction="none", log_target=True)
        elif beta == 1:
            jsd = F.kl_div(teacher, student, reduction="none", log_target=True)
        else:
            mixture = torch.logsumexp(torch.stack([student + math.log1p(-beta), teacher + math.log(beta)]), dim=0)
            kl_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
            kl_student = F.kl_div(mixture, student, reduction="none", log_target=True)
            jsd = beta * kl_teacher + (1 - beta) * kl_student
        return jsd[labels != -100].sum()

    heads = Heads(VOCAB, VOCAB)
    z = F.linear(heads.x, heads.weight) + heads.low_rank[0] @ heads.low_rank[1].T
    t = F.linear(heads.hidden, heads.teacher)
    for name, beta in (("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)):
        for temperature in (1.0, 2.0):
            expected = temperature**2 * generalized_jsd_loss(z, t, heads.labels, beta, temperature)
            actual, _ = heads.loss(DistillationOptions(name, beta, temperature, 0.0))
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_a_student_equal_to_its_teacher_has_no_divergence():
    for name, beta in DIVERGENCES:
        heads = Heads(VOCAB, VOCAB + 10)
        heads.hidden, heads.low_rank[1].data[:] = heads.x.detach(), 0
        heads.teacher = torch.cat([heads.weight.detach(), torch.full((10, 24), 1e3)])  # its padding has no effect
        _, sums = heads.loss(DistillationOptions(name, beta, 1.0, 0.0))
        assert abs(sums[0].item()) < 1e-6 * sums[1].item()


@pytest.mark.parametrize("options", [{"logits_scaling": 8.0, "lm_head_bias": True}, {"final_logit_softcapping": 2.0}])
def test_a_model_passes_its_scaled_hidden_states_to_the_loss(options):
    config = ModelConfig(vocab_size=VOCAB, block_size=16, n_layer=1, n_embd=32, n_head=2, padding_multiple=1, **options)
    models = [GPT(config).eval() for _ in range(2)]
    for seed, model in enumerate(models):
        initialize(model, seed)
        model.lm_head.weight.data.mul_(20)
    student, teacher = models
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))
    hidden, _ = teacher(ids, Targets(ids, lambda model, x, labels: model.head_input(x).detach()))
    head = lambda: (teacher.lm_head.weight, teacher.lm_head.bias)  # noqa: E731
    softcap = config.final_logit_softcapping
    loss = DistillationLoss(DistillationOptions("forward_kl", 0.5, 1.0, 0.25), hidden, head, softcap, VOCAB)
    total, balancing_loss = student(ids, Targets(ids, partial(GPT.cross_entropy, row_loss=loss)))
    assert balancing_loss == 0
    log_p, log_q = (model(ids).double()[..., :VOCAB].log_softmax(-1) for model in models)
    divergence = (log_q.exp() * (log_q - log_p)).sum()
    assert divergence > 1
    torch.testing.assert_close(loss.sums[0].double(), divergence, rtol=1e-5, atol=0)
    label = F.cross_entropy(student(ids).flatten(0, 1), ids.flatten(), reduction="sum")
    expected = 0.75 * loss.sums[0] + 0.25 * label
    torch.testing.assert_close(total, expected, rtol=1e-5, atol=0)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            self.numel = max(self.numel, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out


def test_m1_logits_of_neither_model_are_materialized():
    vocab, n = 50304, 768
    x, hidden = torch.randn(n, 8, requires_grad=True), torch.randn(n, 8)
    weight, teacher = torch.randn(vocab, 8, requires_grad=True), torch.randn(vocab, 8)
    rows = chunk_rows(vocab, torch.device("cpu"))
    for name, _ in DIVERGENCES[:3]:
        loss = DistillationLoss(DistillationOptions(name, 0.5, 2.0, 0.5), hidden, lambda: (teacher, None), None, vocab)
        with _LargestTensor() as seen:
            head_loss(x, weight, None, torch.arange(n), compiled=loss).backward()
        assert seen.numel <= rows * vocab < n * vocab / 2


def test_bf16_products_have_the_error_of_bf16(chunks):
    heads = Heads(VOCAB, VOCAB)
    options = DistillationOptions("jsd", 0.5, 2.0, 0.3)
    expected, _ = heads.expected(options)
    with torch.autocast("cpu", torch.bfloat16):
        actual, _ = heads.loss(options)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=2e-2, atol=0)
    for a, e in zip(heads.gradients(actual), heads.gradients(expected), strict=True):
        assert (a - e).norm() <= 3e-2 * e.norm()
