"""Adapters on experts and routers: one curve on one and two ranks, resumed bit for bit."""

import shutil

import pytest
import torch
from helpers.cases import has_slow_tests
from helpers.groups import Case, losses, run_group, run_uninterrupted_and_killed_twice
from helpers.small_runs import write_base, write_rows

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state

EXPERTS = {
    "family": "qwen2_moe", "mlp_class_name": "LLaMAMoE", "n_expert": 5, "n_expert_per_token": 2, "attn_bias": True,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "moe_indices": [1, 0],
    "router_aux_loss_coef": 0.1, "tie_embeddings": False,
}  # fmt: skip
ADAPTED = ["--lora_experts", "true", "--lora_router", "true", "--lora_r", "3", "--loraplus_lr_ratio", "4"]
FSDP = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
LORA = {"command": "finetune_lora"}
FAST = ("single", "fsdp")
CASES = {
    1: [
        Case("single", ADAPTED, **LORA),
        Case("mlp", [*ADAPTED, "--lora_mlp", "true"], **LORA),
        Case("qlora", [*ADAPTED, "--quantize", "bnb.nf4"], **LORA),
    ],
    2: [
        Case("fsdp", [*ADAPTED, *FSDP], **LORA),
        Case("ddp", [*ADAPTED, "--strategy", "ddp"], **LORA),
        Case("compiled", [*ADAPTED, *FSDP, "--compiler", "torch"], **LORA),
        Case("checkpointed", [*ADAPTED, *FSDP, "--train.activation_checkpointing", "full"], **LORA),
        Case("mlp-fsdp", [*ADAPTED, *FSDP, "--lora_mlp", "true"], **LORA),
        Case("qlora-fsdp", [*ADAPTED, *FSDP, "--quantize", "bnb.nf4"], **LORA),
        Case("qlora-ddp", [*ADAPTED, "--strategy", "ddp", "--quantize", "bnb.nf4"], **LORA),
        Case("qlora-compiled", [*ADAPTED, *FSDP, "--quantize", "bnb.nf4", "--compiler", "torch"], **LORA),
    ],
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory, corpus) -> list[str]:
    folder = write_base(tmp_path_factory.mktemp("input"), corpus, intermediate_size=192, **EXPERTS)
    write_rows(folder)
    return [
        str(folder), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(folder / "rows.jsonl"),
        "--data.prompt_style", "plain", "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_steps", "4", "--train.learning_rate", "1e-2", "--train.lr_schedule", "constant",
        "--train.save_interval", "2", "--eval.interval", "0", "--eval.max_new_tokens", "0",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared, request):
    folder = tmp_path_factory.mktemp("lora-experts")
    for size, cases in CASES.items():
        run_group(folder, size, [case for case in cases if case.name in FAST or has_slow_tests(request)], shared)
    return folder


def relative(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) == 4
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def slow(*case: str):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "one"),
    [("fsdp", "single"), *(slow(name, "single") for name in ("ddp", "compiled", "checkpointed")),
     slow("mlp-fsdp", "mlp"), *(slow(f"qlora-{name}", "qlora") for name in ("fsdp", "ddp", "compiled"))],
)  # fmt: skip
def test_n3_adapters_on_experts(runs, name, one):
    assert losses(runs / one)[-1] < losses(runs / one)[0]
    assert relative(losses(runs / name), losses(runs / one)) < 1e-5
    adapters, reference = (load_state(runs / run / "final" / ADAPTERS) for run in (name, one))
    assert adapters.keys() == reference.keys() and "transformer.h.0.mlp.experts.proj.lora.whole.B" in adapters
    assert any("shared_expert" in key or ".h.1.mlp." in key for key in adapters) == (one == "mlp")
    for key in reference:
        assert reference[key].any(), key
        assert (adapters[key] - reference[key]).norm() <= 2e-4 * reference[key].norm(), key


@pytest.mark.slow
def test_s2_adapters_on_experts_resume_bit_for_bit(runs, shared):
    shutil.copytree(runs / "single", runs / "resumed")
    for later in ("step-00000004", "final"):
        shutil.rmtree(runs / "resumed" / later, ignore_errors=True)
    run_group(runs, 1, [Case("resumed", [*ADAPTED, "--resume", "auto"], **LORA)], shared)
    assert losses(runs / "resumed") == losses(runs / "single")
    adapters, reference = (load_state(runs / run / "final" / ADAPTERS) for run in ("resumed", "single"))
    assert all(torch.equal(adapters[name], reference[name]) for name in reference)


@pytest.mark.slow
def test_s2_run_after_two_sigkills_is_bit_equal(tmp_path, shared):
    words = ["finetune_lora", *shared, *ADAPTED, "--lora_dropout", "0.1", "--devices", "2", *FSDP]
    run_uninterrupted_and_killed_twice(words, tmp_path)
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    adapters, reference = (load_state(tmp_path / run / "final" / ADAPTERS) for run in ("killed", "uninterrupted"))
    assert all(torch.equal(adapters[name], reference[name]) for name in reference)
