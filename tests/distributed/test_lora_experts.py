"""Adapters on experts and routers: one curve on one and two ranks, resumed bit for bit."""

import pytest
from helpers.cases import has_slow_tests
from helpers.compare_runs import copy_without, losses, require_close, require_same
from helpers.groups import Case, run_group

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
def shared(tmp_path_factory, finetuning_flags) -> list[str]:
    flags = finetuning_flags(tmp_path_factory.mktemp("input"), **EXPERTS)
    return [*flags, "--train.max_steps", "4", "--train.save_interval", "2", "--eval.interval", "0"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared, request):
    folder = tmp_path_factory.mktemp("lora-experts")
    for size, cases in CASES.items():
        run_group(folder, size, [case for case in cases if case.name in FAST or has_slow_tests(request)], shared)
    return folder


def slow(*case: str):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "one"),
    [("fsdp", "single"), *(slow(name, "single") for name in ("ddp", "compiled", "checkpointed")),
     slow("mlp-fsdp", "mlp"), *(slow(f"qlora-{name}", "qlora") for name in ("fsdp", "ddp", "compiled"))],
)  # fmt: skip
def test_n3_adapters_on_experts(runs, name, one):
    assert losses(runs / one)[-1] < losses(runs / one)[0]
    adapters = require_close(runs / name, runs / one)
    assert "transformer.h.0.mlp.experts.proj.lora.whole.B" in adapters
    assert any("shared_expert" in key or ".h.1.mlp." in key for key in adapters) == (one == "mlp")
    assert all(adapter.any() for adapter in adapters.values())


@pytest.mark.slow
def test_s2_adapters_on_experts_resume_bit_for_bit(runs, shared):
    copy_without(runs / "single", runs / "resumed", "step-00000004", "final")
    run_group(runs, 1, [Case("resumed", [*ADAPTED, "--resume", "auto"], **LORA)], shared)
    require_same(runs / "resumed", runs / "single")
