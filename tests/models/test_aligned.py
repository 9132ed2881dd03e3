"""Matmuls of odd sizes: padded on CUDA, with the results of unpadded ones (tried on a CPU)."""

import contextlib
import itertools
import shutil
import types
from dataclasses import replace

import pytest
import torch
from helpers.cases import slow_except
from helpers.initialize import add_lora, initialize
from toolkit_align import divergence
from toolkit_align.divergence import DistillationLoss, DistillationOptions
from toolkit_plan.measure.cuda_on_meta import cuda_on_meta
from toolkit_plan.measure.sample import one_layer_of_each_kind
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit import cli
from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.distributed.tensor_parallel import _loss_and_grad_
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY
from toolkit.models import aligned, cross_entropy
from toolkit.models import loss as loss_module
from toolkit.models.aligned import aligned_rows
from toolkit.models.config import ModelConfig
from toolkit.models.cross_entropy import pointwise_cross_entropy
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT
from toolkit.models.head import Head, pad_head
from toolkit.models.lora import adapted_on_meta
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.loss import head_loss

LORA = LoRAConfig(r=4, head=True, projection=True, mlp=True)
SMALL = {"block_size": 64, "n_layer": 2, "n_embd": 64, "n_head": 4}
EXPERTS = {"mlp_class_name": "LLaMAMoE", "n_expert": 60, "n_expert_per_token": 4, "moe_intermediate_size": 64,
           "shared_expert_intermediate_size": 128, "router_aux_loss_coef": 0.01}  # fmt: skip
MODELS = {
    "tied": {"tie_embeddings": True},
    "bias": {"lm_head_bias": True, "final_logit_softcapping": 2.0},
    "experts": EXPERTS,
    "heads": {"head_size": 12},
}


class DoubleTorch(types.ModuleType):
    """torch with float64 as float32."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def padding():
    """Pad on a CPU as on CUDA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned, "needs_alignment", lambda device, dtype: True)
        yield


@pytest.fixture
def in_fp64(monkeypatch):
    """Compute losses in fp64, in several chunks, with ignored rows as on an accelerator."""
    for module in (loss_module, cross_entropy, divergence):
        monkeypatch.setattr(module, "torch", DoubleTorch("torch"))
    monkeypatch.setattr(loss_module, "CPU_CHUNK_ROWS", 3)
    monkeypatch.setattr(loss_module, "_supervised_rows", lambda targets: (None, targets == -100))


def check_equal(actual, expected, tolerance=1e-12):
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape and a.is_contiguous()
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


def distillation_loss(teacher: torch.Tensor, vocab_size: int) -> DistillationLoss:
    options = DistillationOptions("jsd", 0.3, 2.0, 0.5)
    return DistillationLoss(options, torch.randn(8, 8).double(), lambda: (teacher, None), 3.0, vocab_size)


@pytest.mark.parametrize("vocab_size", slow_except([257, 321], [257, 321, 50257]))
def test_losses_and_gradients_do_not_depend_on_padding(vocab_size, in_fp64):
    """With bias, soft cap and adapters of the head; the weight is copied or has padded storage."""
    torch.manual_seed(0)
    sizes = (8, 16), (vocab_size, 16), (vocab_size,), (8, 4), (vocab_size, 4)
    x, weight, bias, *low_rank = (torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes)
    labels = torch.randint(0, vocab_size, (8,)).where(torch.rand(8) < 0.7, -100)
    labels[0] = vocab_size - 1
    teacher = torch.randn(vocab_size + 5, 8, dtype=torch.float64)
    kinds = ("uncompiled", "compiled", "distillation", "log-probabilities")
    for kind, (cap, has_all) in itertools.product(kinds, ((None, False), (2.0, True))):

        def run(kind=kind, cap=cap, has_all=has_all):
            tensors = (x, weight, bias, *low_rank) if has_all else (x, weight)
            torch.manual_seed(1)
            form = {"compiled": pointwise_cross_entropy, "distillation": distillation_loss(teacher, vocab_size - 3)}
            options = low_rank if has_all else None, cap, form.get(kind, False)
            loss = head_loss(x, weight, tensors[2] if has_all else None, labels, *options, log_probs=kind[0] == "l")
            scale = torch.randn(loss.shape, dtype=torch.float64)
            return loss.detach(), *torch.autograd.grad((loss * scale).sum(), tensors)

        expected = run()
        with padding():
            check_equal(run(), expected)
            plain, weight.data = weight.data, aligned_rows(weight.data, weight.dtype)[:vocab_size]
            assert aligned_rows(weight, weight.dtype).data_ptr() == weight.data_ptr()
            check_equal(run(), expected)
            weight.data = plain


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("lora", [None, LORA])
def test_models_do_not_depend_on_padding(name, lora, request):
    """Logits, losses and all gradients, with adapters of a rank below 8 as well."""
    model = GPT(ModelConfig(vocab_size=257, padded_vocab_size=257, **SMALL, **MODELS[name]))
    initialize(model, 0)
    if lora is not None:
        if name == "experts":
            lora = replace(lora, mlp=False)
        add_lora(model, lora)
    dtype, tolerance = torch.float32, 1e-3  # grouped_mm has no fp64
    if name != "experts":
        request.getfixturevalue("in_fp64")
        dtype, tolerance = torch.float64, 1e-12
    model, generator = model.to(dtype), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(dtype)
    ids, labels = torch.randint(0, 257, (2, 2, 20), generator=generator)
    trained = [p for p in model.parameters() if p.requires_grad]

    def run():
        loss, logits = model(ids, labels)[0], model(ids)
        gradients = torch.autograd.grad(loss + logits.square().sum(), trained)
        return loss.detach(), logits.detach().clone(memory_format=torch.contiguous_format), *gradients

    expected = run()
    with padding():
        check_equal(run(), expected, tolerance)
        pad_head(model)
        check_equal(run(), expected, tolerance)
    if model.config.tie_embeddings:
        assert model.lm_head.weight is model.transformer.wte.weight


def test_tokens_of_other_ranks_are_not_those_of_the_padding():
    """Of tensor parallelism's loss: padded columns would be the next rank's first tokens."""
    logits = torch.randn(3, 8)
    logits[:, 5:] = -torch.inf
    padded, plain = (
        _loss_and_grad_(None, 10, 5, z.clone(), torch.tensor([[12], [15], [9]]), True) for z in (logits, logits[:, :5])
    )
    torch.testing.assert_close(padded[1], plain[1])
    torch.testing.assert_close(padded[0][:, :5], plain[0])
    assert not padded[0][:, 5:].any()


def test_files_and_generation_do_not_depend_on_padding(tmp_path):
    config = ModelConfig(vocab_size=257, padded_vocab_size=257, tie_embeddings=True, **SMALL)
    model = GPT(config).bfloat16()
    initialize(model, 0)

    def save(model, name):
        options = {"hyperparameters": None, "tokenizer": None}
        (tmp_path / name).mkdir()
        write_model_files(tmp_path / name, state_dict=model.state_dict(), config=config, **options)
        return torch.load(tmp_path / name / "lit_model.pth")

    save(model, "plain")
    prompt = torch.arange(1, 9)
    tokens = list(generate(model, prompt, max_new_tokens=20, sampling=GREEDY))
    with padding():
        loaded = load_model(tmp_path / "plain").eval()
        weight = loaded.lm_head.weight
        assert weight.shape == (257, 64) and weight.untyped_storage().size() == 320 * 64 * 2
        assert weight is loaded.transformer.wte.weight
        saved = save(loaded, "padded")
        assert saved["lm_head.weight"].untyped_storage().size() == 257 * 64 * 2
        assert saved["lm_head.weight"].data_ptr() == saved["transformer.wte.weight"].data_ptr()
        with Matmuls() as seen:
            assert list(generate(loaded, prompt, max_new_tokens=20, sampling=GREEDY)) == tokens
        weights = [operand for operands in seen.operands for operand in operands if set(operand.shape) == {64, 320}]
        assert {operand.data_ptr() for operand in weights} == {weight.data_ptr()}  # no copy for each token
    loaded.load_state_dict(torch.load(tmp_path / "plain" / "lit_model.pth"), assign=True)
    loaded.tie_weights()
    with padding():
        assert list(generate(loaded, prompt, max_new_tokens=20, sampling=GREEDY)) == tokens


@pytest.mark.slow
def test_a_checkpoint_from_before_resumes_with_padding(tmp_path, monkeypatch):
    """In 16 bits: without a copy of the weight, and with the optimizer's state of unpadded runs."""
    monkeypatch.chdir(tmp_path)
    flags = ["pico-llama", "--accelerator", "cpu", "--devices", "1", "--precision", "bf16-true"]
    flags += ["--model_config.padded_vocab_size", "301", "--data", "SyntheticTokens", "--data.vocab_size", "300"]
    flags += ["--train.global_batch_size", "4"]
    flags += ["--train.micro_batch_size", "2", "--train.max_seq_length", "16", "--compiler", "none"]
    storages = []

    def pretrain(folder, steps):
        limit = ["--train.max_steps", str(steps), "--resume", "auto"]
        assert cli.main(["pretrain", *flags, "--out_dir", folder, *limit]) == 0

    pretrain("plain", 2)
    shutil.copytree("plain", "padded")
    pretrain("plain", 4)
    forward = Head.loss
    monkeypatch.setattr(
        Head,
        "loss",
        lambda self, *args, **options: (
            storages.append(self.weight.untyped_storage().size()) or forward(self, *args, **options)
        ),
    )
    with padding():
        pretrain("padded", 4)
    assert set(storages) == {320 * 64 * 2}
    plain, padded = (torch.load(f"{name}/final/lit_model.pth") for name in ("plain", "padded"))
    for name, weight in plain.items():
        assert padded[name].shape == weight.shape
        torch.testing.assert_close(padded[name], weight, rtol=0.02, atol=1e-3)


class Matmuls(TorchDispatchMode):
    """Records the 16-bit matrices of matmuls and of attention, results included."""

    ATTENTION = "_scaled_dot_product_flash_attention"
    NAMES = ("mm", "addmm", "bmm", "baddbmm", "grouped_product", "grouped_outer_product", ATTENTION,
             f"{ATTENTION}_backward")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.operands = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._schema.name.split("::")[1] in self.NAMES:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.operands.append([t for t in tensors if t.ndim > 1 and t.dtype.itemsize == 2])
        return out


def is_aligned(matrix: torch.Tensor) -> bool:
    """Whether sizes are divisible by 8 and rows (or columns, if transposed) start at multiples of 16 bytes."""
    rows = matrix.stride(-2) if matrix.stride(-1) == 1 else matrix.stride(-1)
    return rows % 8 == 0 and all(size % 8 == 0 for size in matrix.shape[-2:]) and 1 in matrix.stride()[-2:]


STEPS = {
    "gpt2": ("gpt2", None),
    "gpt2, adapters": ("gpt2", LORA),
    "Qwen1.5-MoE-A2.7B": ("Qwen1.5-MoE-A2.7B", None),
    "pico-llama": ("pico-llama", None),
    "open_llama_3b": ("open_llama_3b", None),  # heads of 100
}


@pytest.mark.parametrize("name", slow_except(["gpt2, adapters", "Qwen1.5-MoE-A2.7B", "open_llama_3b"], STEPS))
@pytest.mark.parametrize("autocast", [torch.bfloat16, None])
def test_all_matmuls_of_a_step_on_cuda_are_aligned(name, autocast):
    """Forward and backward, of the loss and of logits. The numbers of rows and tokens are divisible by 8."""
    config, lora = get_config(STEPS[name][0]), STEPS[name][1]
    if name == "pico-llama":
        config = replace(config, padding_multiple=1).with_vocab_size(257)
    config = one_layer_of_each_kind(config)[0]
    model = adapted_on_meta(config, lora)
    if autocast is None:
        model.to(torch.bfloat16)
    ids = torch.empty(8, 64, dtype=torch.int64, device="meta")
    with Matmuls() as seen:
        with cuda_on_meta(autocast):
            loss = model(ids, ids)[0] + model(ids).float().sum()
        loss.backward()
    assert len(seen.operands) > 12
    for operands in seen.operands:
        assert all(map(is_aligned, operands)), [(tuple(t.shape), t.stride()) for t in operands]


def test_padded_layers_compile_without_graph_breaks():
    model = GPT(ModelConfig(vocab_size=64, **SMALL | EXPERTS | {"n_layer": 1})).bfloat16()
    add_lora(model, replace(LORA, mlp=False))
    initialize(model, 0)
    ids = torch.arange(64).view(2, 32)
    with padding():
        expected = model(ids, ids)[0]
        torch.compiler.reset()
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(model(ids, ids)[0], expected, rtol=1e-4, atol=0)  # decomposed operators round
