"""N3 for a MoE model: the same losses, load-balancing loss included, and weights on one and two ranks."""

import pytest
from helpers.compare_runs import losses, relative, require_close
from helpers.groups import Case, run_group

EXPERTS = [
    "--model_config.family", "mixtral", "--model_config.mlp_class_name", "LLaMAMoE", "--model_config.n_expert", "5",
    "--model_config.n_expert_per_token", "2", "--model_config.norm_topk_prob", "true",
    "--model_config.router_aux_loss_coef", "0.1", "--model_config.moe_indices", "[1,0]",
    "--model_config.tie_embeddings", "false",
]  # fmt: skip
SHARDED = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
CASES = {
    1: [
        Case("single", EXPERTS),
        Case("one-micro-batch", [*EXPERTS, "--train.micro_batch_size", "8"]),
        Case("mixed", [*EXPERTS, "--precision", "bf16-mixed"]),
        Case("one-micro-batch-mixed", [*EXPERTS, "--precision", "bf16-mixed", "--train.micro_batch_size", "8"]),
    ],
    2: [
        Case("ddp", [*EXPERTS, "--strategy", "ddp"]),
        Case("fsdp", [*EXPERTS, *SHARDED]),
        Case("fsdp-sharded-state", [*EXPERTS, *SHARDED, "--fsdp.state_dict_type", "sharded"]),
        Case("fsdp-compiled", [*EXPERTS, *SHARDED, "--compiler", "torch"]),
        Case("fsdp-mixed", [*EXPERTS, *SHARDED, "--precision", "bf16-mixed"]),
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shared_flags):
    folder = tmp_path_factory.mktemp("experts")
    for size, cases in CASES.items():
        run_group(folder, size, cases, shared_flags)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one-micro-batch", "ddp", "fsdp", "fsdp-sharded-state", "fsdp-compiled"])
def test_n3_experts_in_fp32(folder, name):
    weights = require_close(folder / name, folder / "single")
    assert "transformer.h.0.mlp.experts.fc_1.weight" in weights


@pytest.mark.slow
def test_n3_experts_in_bf16(folder):
    allowed = 2 * relative(losses(folder / "one-micro-batch-mixed"), losses(folder / "mixed"))
    assert 0 < relative(losses(folder / "fsdp-mixed"), losses(folder / "mixed")) <= allowed < 5e-3
