"""S2: a run on two ranks that SIGKILL ends twice equals an uninterrupted one, bit for bit."""

import pytest
from helpers.compare_runs import require_same
from helpers.groups import run_uninterrupted_and_killed_twice

from tests.distributed.test_lora_experts import ADAPTED, EXPERTS

SHARDED = ["--fsdp.state_dict_type", "sharded"]
SELECTIVE = ["--train.activation_checkpointing", "selective"]
ASYNC = ["--train.async_save", "true"]
TENSOR = ["--tensor_parallel_size", "2", *ASYNC]
PIPELINE = ["--model_config.n_layer", "4", "--pipeline_parallel_size", "2"]
LORA = ["--strategy", "fsdp", "--lora_dropout", "0.1"]
RUNS = {
    "full": [], "sharded": SHARDED, "less-memory": [*SHARDED, *SELECTIVE, "--fsdp.accumulate", "sharded"],
    "tensor-full": TENSOR, "tensor-sharded": [*TENSOR, *SHARDED],
    "pipeline-full": [*PIPELINE, *ASYNC], "pipeline-sharded": [*PIPELINE, *SHARDED],
    "lora": [*LORA, *SELECTIVE], "lora-experts": [*LORA, *ADAPTED],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_s2_run_after_two_sigkills_is_bit_equal(name, shared_flags, finetuning_flags, tmp_path):
    words = ["pretrain", *shared_flags]
    if name.startswith("lora"):
        config = EXPERTS if name == "lora-experts" else {}
        words = ["finetune_lora", *finetuning_flags(tmp_path / "base", **config)]
    run_uninterrupted_and_killed_twice([*words, *RUNS[name], "--devices", "2"], tmp_path)
    require_same(tmp_path / "killed", tmp_path / "uninterrupted")
