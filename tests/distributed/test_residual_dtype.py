"""N3 with a bf16 residual stream: the same training on one and two ranks, in every mesh."""

import pytest
from helpers.compare_runs import losses, relative
from helpers.groups import Case, run_group

pytestmark = pytest.mark.slow
BF16 = ["--precision", "bf16-mixed", "--train.residual_dtype", "bf16"]
FSDP = ["--fsdp.sharding_strategy", "FULL_SHARD"]
CASES = {
    1: [Case("single", BF16), Case("split-8", [*BF16, "--train.micro_batch_size", "8"])],
    2: [
        Case("ddp", [*BF16, "--strategy", "ddp"]),
        Case("fsdp", [*BF16, *FSDP]),
        Case("full", [*BF16, *FSDP, "--train.activation_checkpointing", "full"]),
        Case("compiled", [*BF16, *FSDP, "--compiler", "torch"]),
        Case("pipeline", [*BF16, "--pipeline_parallel_size", "2"]),
        Case("context", [*BF16, "--context_parallel_size", "2"]),
        Case("tensor", [*BF16, "--tensor_parallel_size", "2"]),
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_flags):
    folder = tmp_path_factory.mktemp("residual")
    for size, cases in CASES.items():
        run_group(folder, size, cases, shared_flags)
    return folder


@pytest.mark.parametrize("name", [case.name for case in CASES[2]])
def test_n3_one_curve(runs, name):
    allowed = 2 * relative(losses(runs / "split-8"), losses(runs / "single"))
    assert relative(losses(runs / name), losses(runs / "single")) <= allowed < 2e-3


def test_recomputed_activations_change_no_bit(runs):
    assert losses(runs / "full") == losses(runs / "fsdp")
