"""bf16 weights with fp32 masters, bf16 and 8-bit moments, Muon: the updates, what is saved, what is refused."""

import copy
import math
import sys
import weakref
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from helpers.cases import check_each, slow_except
from helpers.compare_runs import assert_same_weights, losses
from helpers.groups import free_port, start_ranks
from helpers.saving import save_sharded
from helpers.tiny_configs import NATIVE_CONFIGS
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.test_run import arguments
from toolkit.checkpoints.finite import nonfinite_state
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import full_state, sharded_state, tied_names
from toolkit.checkpoints.weights import load_state, load_weights, save_state, save_weights
from toolkit.config import AUTO, PRETRAIN, OptimizerArgs
from toolkit.distributed.ddp_bf16 import FP32GradientSum
from toolkit.errors import UserError
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config
from toolkit.models.gpt import GPT, model_on_meta
from toolkit.models.lora_config import LoRAConfig
from toolkit.optim import bf16
from toolkit.optim.bf16 import round_stochastically
from toolkit.optim.classes import build_optimizer, resolve_optimizer
from toolkit.optim.groups import block_params, no_decay_params, parameter_groups
from toolkit.optim.hybrid import Muon
from toolkit.optim.update import clip_gradients
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.training.callbacks import Callback
from toolkit.training.engine import run_training

NAMES = ("AdamW", "SGD", "NAdam", "Adafactor", "Muon", "AdamW8bit")


class Tied(nn.Module):
    """An embedding that is also the head, and a matrix of 8-bit size."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 64)
        self.block = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 16, bias=False)
        self.head.weight = self.wte.weight


def build(precision="32-true", name="AdamW", **options):
    torch.manual_seed(0)
    model = Tied()
    if precision == "bf16-master":
        model.bfloat16()
    extra = {"options": {"momentum": 0.9}} if name == "SGD" else {}
    resolved = resolve_optimizer(OptimizerArgs(name=name, **extra, **options), PRETRAIN)
    inside = {"block.weight": (), "block.bias": ()}
    return model, build_optimizer(model, resolved, 1e-2, precision, no_decay_params(model), in_blocks=inside)


def train(model, optimizer, steps) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()


def test_a_master_is_the_fp32_weight_of_the_same_gradients(monkeypatch):
    """Also where a step goes through the weights one by one."""

    def check(name, chunk):
        monkeypatch.setattr(bf16.chunks, "__defaults__", (chunk,))
        model, optimizer = build("bf16-master", name)
        reference, plain = build("32-true", name)
        with torch.no_grad():
            for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
                other.copy_(ours)
        for pair in ((model, optimizer), (reference, plain)):
            train(*pair, range(4))
        for ours, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(optimizer.state[ours]["master"], other)
            assert torch.equal(ours, other.bfloat16()) and ours.dtype == torch.bfloat16

    check_each(check, [(name, 1 << 27) for name in NAMES] + [("AdamW", 1)])


def test_fp32_moments_are_freed_after_each_chunk(monkeypatch):
    monkeypatch.setattr(bf16.chunks, "__defaults__", (1,))  # a chunk per weight
    stored: list[weakref.ref] = []
    to_fp32 = bf16.BF16Optimizer._to_fp32

    def round_(value, generator):
        stored.append(weakref.ref(value))
        return round_stochastically(value, generator)

    def to_fp32_(optimizer, value):
        assert not any(ref() is not None for ref in stored), "moments of the chunk before"
        return to_fp32(optimizer, value)

    monkeypatch.setattr(bf16, "round_stochastically", round_)
    monkeypatch.setattr(bf16.BF16Optimizer, "_to_fp32", to_fp32_)

    def check(name):
        stored.clear()
        model, optimizer = build("bf16-master", name, state_dtype="bf16")
        train(model, optimizer, range(2))
        assert stored and not any(ref() is not None for ref in stored), "moments after the step"

    check_each(check, ["AdamW", "NAdam", "Muon"])


def test_bf16_gradients_are_clipped_in_fp32():
    model, optimizer = build("bf16-master", "SGD", weight_decay=0.0)
    start = [p.detach().float() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    norm = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()
    clip_gradients(SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups), norm, 1.0)
    gradients = [p.grad.float() / (norm + 1e-6) for p in model.parameters()]
    optimizer.step()
    for parameter, before, gradient in zip(model.parameters(), start, gradients, strict=True):
        update = (before - optimizer.state[parameter]["master"]) / 1e-2
        torch.testing.assert_close(update, gradient, rtol=0, atol=2e-5)


def test_stochastic_rounding_has_the_mean_of_the_value():
    generator = torch.Generator().manual_seed(0)
    value = torch.full((100_000,), 1 + 2**-7 * 0.3)  # 0.3 of the way to the next bf16 value
    rounded = round_stochastically(value, generator)
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7}
    assert rounded.double().mean().item() == pytest.approx(value[0].item(), abs=5 * 2**-7 * math.sqrt(0.21 / 1e5))
    negative = round_stochastically(-value, generator).double().mean().item()
    assert negative == pytest.approx(-value[0].item(), abs=5 * 2**-7 * math.sqrt(0.21 / 1e5))
    exact = torch.tensor([0.0, -0.0, 1.5, -3e38, math.inf, -math.inf])
    assert torch.equal(round_stochastically(exact.bfloat16().float(), generator), exact.bfloat16())
    nan = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)  # CUDA's is the first
    assert round_stochastically(nan, generator).isnan().all()


def test_random_numbers_depend_on_weight_and_step_only():
    """Not on which weights had a gradient before, as after a resume."""
    draws = []
    for order in (1, -1):
        model, optimizer = build(state_dtype="bf16")
        by_weight = [
            [torch.rand((), generator=optimizer._generator(parameter)).item() for _ in range(3)]
            for parameter in list(model.parameters())[::order]
        ]
        draws.append(by_weight[::order])
    assert draws[0] == draws[1]
    numbers = [number for of_weight in draws[0] for number in of_weight]
    assert len(set(numbers)) == len(numbers)


def test_bf16_moments_decay_as_fp32_ones_do():
    """A decay of 0.1 % per step is below bf16's half step: rounded to the nearest, the moment would stay as it is."""
    found = {}
    for options in ({}, {"state_dtype": "bf16"}):
        model, optimizer = build(betas=(0.9, 0.999), **options)
        train(model, optimizer, range(1))
        for _ in range(150):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
        moment = optimizer.state[model.block.weight]["exp_avg_sq"]
        found[moment.dtype] = moment.double().mean().item()
    assert found[torch.bfloat16] == pytest.approx(found[torch.float32], rel=0.02)


def test_s2_states_resume_bit_for_bit(tmp_path):
    def check(precision, name, options, kind):
        folder = tmp_path / f"{precision}-{name}-{len(options)}-{kind}"
        (folder / "trainer").mkdir(parents=True)
        model, optimizer = build(precision, name, **options)
        tied = tied_names(model)
        train(model, optimizer, range(3))
        if kind == "full":
            weights, saved = full_state(model, optimizer, tied)
            save_weights(weights, folder / "lit_model.pth")
        else:
            weights, tensors, saved = sharded_state(model, optimizer, tied)
            save_sharded(weights, folder / "lit_model.pth")
            save_sharded(tensors, folder / "trainer" / "optimizer")
        save_state({"optimizer": saved}, folder / "state.pth")
        other, resumed = build(precision, name, **options)
        stored = load_weights(folder)
        assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
        with torch.no_grad():
            for parameter_name, parameter in other.named_parameters():
                parameter.copy_(stored.get(parameter_name, stored.get("head.weight")))
        load_optimizer(
            other, resumed, load_state(folder / "state.pth")["optimizer"], folder / "state.pth",
            folder / "trainer" / "optimizer", may_be_empty=False, weights=folder / "lit_model.pth",
        )  # fmt: skip
        for pair in ((model, optimizer), (other, resumed)):
            train(*pair, range(3, 6))
        for ours, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, its)
            for key, value in optimizer.state[ours].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(resumed.state[its][key])), key

    cases = [("bf16-master", name, {}) for name in NAMES] + [("32-true", name, {}) for name in ("Muon", "AdamW8bit")]
    moments = {"state_dtype": "bf16"}
    cases += [("32-true", "AdamW", moments), ("bf16-master", "AdamW", moments), ("bf16-master", "Muon", moments)]
    check_each(check, [(*case, kind) for case in cases for kind in ("full", "sharded")])


def test_n7_a_master_that_is_not_finite_is_found():
    model, optimizer = build("bf16-master")
    train(model, optimizer, range(1))
    assert nonfinite_state(model, optimizer) == []
    optimizer.state[model.block.weight]["master"][0, 0] = torch.nan
    assert nonfinite_state(model, optimizer) == ["block.weight|master"]


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest():
    model, optimizer = build(name="Muon")
    keys = {name: set(optimizer.state_dict()["param_groups"][0]) for name in ("main",)}
    assert keys["main"] >= {"momentum", "ns_steps", "adjust_lr_fn"}
    train(model, optimizer, range(1))
    kinds = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert {name for name, kind in kinds.items() if kind == {"momentum_buffer"}} == {"block.weight"}
    assert all(kind == {"step", "exp_avg", "exp_avg_sq"} for name, kind in kinds.items() if name != "block.weight")
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name for name, p in model.named_parameters() if decays[id(p)]} == {"block.weight"}  # N5


def test_muon_is_torch_muon_beside_torch_adamw():
    (model, optimizer), (reference, _) = build(name="Muon"), build()
    rest = [p for name, p in reference.named_parameters() if name != "block.weight"]
    torchs = torch.optim.Muon([reference.block.weight], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(3):
        train(model, optimizer, [step])
        generator = torch.Generator().manual_seed(step)
        for parameter in reference.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().float()
        torchs.step()
        adamw.step()
    for value, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=3e-4)  # torch iterates in bf16


def test_muon_orthogonalizes_queries_keys_and_values_one_by_one():
    for name in ("qwen3-moe", "deepseek-v2"):
        model = GPT(ModelConfig(block_size=64, n_layer=2, n_embd=64, n_head=4, **NATIVE_CONFIGS[name]))
        options = resolve_optimizer(OptimizerArgs(name="Muon"), PRETRAIN)
        optimizer = build_optimizer(
            model, options, 1e-2, "32-true", no_decay_params(model), in_blocks=block_params(model, (Block,))
        )
        layer, rows = model.transformer.h[0].attn.stacked_rows
        weight = model.get_parameter(f"transformer.h.0.attn.{layer}.weight")
        parts = [part.detach().clone() for part in weight.split(rows)]
        reference = torch.optim.Muon(parts, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for _ in range(2):
            weight.grad = torch.randn_like(weight)
            for part, gradient in zip(parts, weight.grad.split(rows), strict=True):
                part.grad = gradient.clone()
            optimizer.step()
            reference.step()
        torch.testing.assert_close(weight, torch.cat(parts), rtol=0, atol=3e-4)  # torch iterates in bf16
        assert len(rows) > 1


def test_run_that_began_with_fused_qkv_in_muon_keeps_them(corpus, tmp_path):
    def train(steps, **options):
        optimizer = OptimizerArgs(name="Muon", options=options)
        run_training(arguments(corpus, tmp_path, train={"max_steps": steps}, optimizer=optimizer, resume="auto"))
        saved = yaml.safe_load((tmp_path / "final/hyperparameters.yaml").read_text())
        return saved["optimizer"]["options"]["split_qkv"]

    assert train(1, split_qkv=False) is False  # a checkpoint without the key, as earlier versions wrote them
    assert train(2) is False
    with pytest.raises(UserError, match=r"split_qkv"):
        train(3, split_qkv=True)


class Scale(nn.Module):
    """As a norm: the gradient of its weight comes in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return (x.float() * self.weight).to(x.dtype)


def rank_main(rank, port, folder) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), Scale(), nn.Linear(6, 4)).bfloat16()
    found = {}
    for n in (1, 3):
        wrapped, sync = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True), FP32GradientSum()
        sync.attach(wrapped)
        for repeat in range(2):
            for i in range(n):
                with sync.no_backward_sync(wrapped, enabled=i < n - 1):
                    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * rank + i)).bfloat16()
                    with mock.patch.object(torch, "empty_like", side_effect=torch.empty_like) as allocate:
                        wrapped(x).float().square().sum().backward()
                    assert not allocate.called  # the sums are there
            found[n, repeat] = [p.grad.clone() for p in wrapped.parameters()]
            wrapped.zero_grad()
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_n2_gradients_of_bf16_weights_are_summed_in_fp32_over_micro_batches_and_ranks(tmp_path):
    start_ranks(rank_main, (free_port(), tmp_path), 2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), Scale(), nn.Linear(6, 4)).bfloat16()
    for n, dtype in ((1, torch.bfloat16), (3, torch.float32)):
        sums = [torch.zeros(p.shape) for p in model.parameters()]
        for rank in range(2):
            for i in range(n):
                x = torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * rank + i)).bfloat16()
                model(x).float().square().sum().backward()
                for total, parameter in zip(sums, model.parameters(), strict=True):
                    total += parameter.grad.float() / 2
                model.zero_grad()
        for repeat in range(2):
            for ours, other, expected in zip(found[0][n, repeat], found[1][n, repeat], sums, strict=True):
                assert ours.dtype == dtype and torch.equal(ours, other)
                assert torch.allclose(ours.float(), expected.to(dtype).float(), rtol=1e-6, atol=0)


# ---- runs


class Gradients(Callback):
    """Records the dtypes of weights and gradients."""

    def __init__(self) -> None:
        self.dtypes = set()

    def on_before_optimizer_step(self, trainer) -> None:
        self.dtypes |= {(p.dtype, p.grad.dtype) for p in trainer.model.parameters()}


RUNS = {
    "accumulating": ("bf16-master", OptimizerArgs(), 4),
    "one micro-batch": ("bf16-master", OptimizerArgs(), 8),
    "in backward": ("bf16-master", OptimizerArgs(name="AdamW8bit", in_backward=True), 8),
    "bf16 moments": ("bf16-mixed", OptimizerArgs(state_dtype="bf16"), 4),
    "Muon": ("32-true", OptimizerArgs(name="Muon"), 4),
    "8 bits": ("32-true", OptimizerArgs(name="AdamW8bit"), 4),
}


@pytest.mark.parametrize("run", slow_except(["accumulating"], RUNS))
def test_s2_a_run_resumes_bit_for_bit(corpus, tmp_path, capsys, run):
    precision, optimizer, micro = RUNS[run]
    train = {"max_steps": 6, "save_interval": 3, "tie_embeddings": True, "micro_batch_size": micro}
    train |= {"max_norm": 0.0} if optimizer.in_backward else {}
    gradients = Gradients()
    callbacks = [] if optimizer.in_backward else [gradients]  # there would be no gradients to see
    for out, resume in (("whole", False), ("resumed", str(tmp_path / "whole" / "step-00000003"))):
        options = {"train": train, "precision": precision, "optimizer": optimizer, "resume": resume}
        run_training(arguments(corpus, tmp_path / out, **options), callbacks=callbacks)
    moments = " with bf16 moments" if optimizer.state_dtype == "bf16" else ""
    assert f"; cpu, {precision}, {optimizer.name}{moments}; " in capsys.readouterr().out
    assert_same_weights(tmp_path / "whole" / "final", tmp_path / "resumed" / "final")
    assert losses(tmp_path / "whole")[3:] == losses(tmp_path / "resumed")
    first, second = (
        load_state(tmp_path / out / "final" / "trainer" / "state.pth")["optimizer"]["state"]
        for out in ("whole", "resumed")
    )
    for name, values in first.items():
        assert "master" not in values
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(second[name][k])) for k, v in values.items()), name
    assert {weight.dtype for weight in load_weights(tmp_path / "whole" / "final").values()} == {torch.float32}
    if precision == "bf16-master" and not optimizer.in_backward:
        expected = torch.float32 if micro == 4 else torch.bfloat16
        assert gradients.dtypes == {(torch.bfloat16, expected)}


@pytest.mark.slow
def test_bf16_true_says_how_many_updates_round_away(corpus, tmp_path, capsys):
    def lines(**options):
        train = {"max_steps": 1, "learning_rate": 2e-5}
        run_training(arguments(corpus, tmp_path / options["precision"], train=train, **options))
        return [line for line in capsys.readouterr().out.splitlines() if "round away" in line]

    (line,) = lines(precision="bf16-true")
    assert "--precision bf16-master" in line and "2e-05" in line
    assert not lines(precision="bf16-master")


def test_a_missing_package_is_one_message(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError, match="^--optimizer.name AdamW8bit: needs bitsandbytes; run: pip install"):
        build(name="AdamW8bit")


def test_muon_takes_the_matrices_of_blocks_but_no_biases():
    """The biases of experts are matrices, too: one row per expert."""
    experts = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 64}
    config = replace(get_config("pico-llama").with_vocab_size(128), bias=True, **experts)
    model = model_on_meta(config)
    biases = {n for n, p in model.named_parameters() if n.endswith(".bias") and p.ndim == 2}
    inside, no_decay = block_params(model, (Block,)), no_decay_params(model)
    groups = parameter_groups(model, 0.1, no_decay, Muon, inside)
    main = {id(p) for group in groups if group["main"] for p in group["params"]}
    names = {n for n, p in model.named_parameters() if id(p) in main}
    assert biases and not names & biases and all(".h." in name for name in names)
    assert {n.rpartition(".")[2] for n in names} == {"weight"} and len(names) > 4


FSDP = {"strategy": "fsdp"}


def test_errors_name_the_option_and_the_fix():
    def check(message, devices, **options):
        with pytest.raises(UserError, match=message) as error:
            resolve_auto(arguments("corpus", "out", **{"strategy": "auto"} | options), DeviceSpec("cpu", devices, 1))
        assert "\n" not in str(error.value)

    moments = OptimizerArgs(state_dtype="bf16")
    cases = {
        "--precision bf16-master.*fsdp.*use bf16-mixed": (2, FSDP | {"precision": "bf16-master"}),
        "--precision bf16-master.*use bf16-true": (1, {"precision": "bf16-master", "lora": LoRAConfig()}),
        "state_dtype bf16 has no .*SGD: it has no moments": (
            1,
            {"optimizer": replace(moments, name="SGD")},
        ),
        "state_dtype bf16.*8bit: its moments are 8-bit": (
            1,
            {"optimizer": replace(moments, name="AdamW8bit")},
        ),
        "state_dtype bf16.*are already bf16": (1, {"optimizer": moments, "precision": "bf16-true"}),
    }
    for message, (devices, options) in cases.items():
        check(message, devices, **options)
    for strategy, devices in (("ddp", 2), ("single", 1)):
        config = resolve_auto(
            arguments("corpus", "out", precision="bf16-master", optimizer=moments, strategy=strategy),
            DeviceSpec("cpu", devices, 1),
        )
        assert config.optimizer["state_dtype"] == "bf16"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", NAMES)
def test_gpu_masters_learn_as_fp32_weights_do(name):
    """On CUDA with the fused kernels, and with bf16 moments where the optimizer has them."""
    ids = torch.randint(0, 128, (4, 64), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = []
    for precision in ("32-true", "bf16-master"):
        torch.manual_seed(0)
        model = GPT(get_config("pico-llama").with_vocab_size(128)).cuda()
        if precision == "bf16-master":
            model.bfloat16()
        dtype = "bf16" if precision == "bf16-master" and name not in ("SGD", "AdamW8bit", "Adafactor") else AUTO
        options = resolve_optimizer(OptimizerArgs(name=name, state_dtype=dtype), PRETRAIN)
        in_blocks = block_params(model, (Block,))
        optimizer = build_optimizer(model, options, 1e-3, precision, no_decay_params(model), in_blocks=in_blocks)
        for _ in range(20):
            loss, n = model(ids, ids)
            (loss / ids.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item() / ids.numel())
    assert found[1] == pytest.approx(found[0], rel=0.02)
