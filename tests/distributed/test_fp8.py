"""N3 in fp8, emulated on CPUs: the same training on one and two ranks."""

from importlib.util import find_spec

import pytest
from helpers.compare_runs import losses, relative
from helpers.groups import Case, run_group

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")]
FP8, ROWS = (["--precision", "bf16-mixed", "--train.fp8", kind] for kind in ("tensorwise", "rowwise"))
FSDP = ["--fsdp.sharding_strategy", "FULL_SHARD"]
TRUE = ["--precision", "bf16-true", "--train.fp8", "tensorwise", *FSDP]
CASES = {
    1: [
        Case("tensorwise", FP8),
        Case("rowwise", ROWS),
        Case("split-8", [*FP8, "--train.micro_batch_size", "8"]),  # the tolerance: a scale is of a micro-batch
    ],
    2: [
        Case("tensorwise-ddp", [*FP8, "--strategy", "ddp"]),
        Case("tensorwise-fsdp", [*FP8, *FSDP, "--fsdp.state_dict_type", "sharded"]),
        Case("tensorwise-full", [*FP8, *FSDP, "--train.activation_checkpointing", "full"]),
        Case("tensorwise-pipeline", [*FP8, "--pipeline_parallel_size", "2"]),
        Case("tensorwise-context", [*FP8, "--context_parallel_size", "2"]),
        Case("rowwise-fsdp", [*ROWS, *FSDP]),
        Case("tensorwise-gathered", [*FP8, *FSDP], fault="fp8 all-gathers on a CPU"),
        Case("true", TRUE, look_at="collectives"),
        Case("true-in-fp8", TRUE, fault="fp8 all-gathers on a CPU", look_at="collectives"),
    ],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_flags):
    folder, seen = tmp_path_factory.mktemp("fp8"), {}
    for size, cases in CASES.items():
        seen |= run_group(folder, size, cases, shared_flags)
    return folder, seen


@pytest.mark.parametrize("name", [case.name for case in CASES[2] if not case.name.startswith("true")])
def test_n3_one_curve(runs, name):
    """Without fp8 all-gathers, FSDP's weights are rounded to bf16 first."""
    folder, _ = runs
    allowed = 2 * relative(losses(folder / "split-8"), losses(folder / "tensorwise"))
    assert relative(losses(folder / name), losses(folder / name.partition("-")[0])) <= allowed < 1e-3


def test_recomputed_activations_change_no_bit(runs):
    folder, _ = runs
    assert losses(folder / "tensorwise-full") == losses(folder / "tensorwise-fsdp")


def test_all_gathers_in_fp8_change_no_bit(runs):
    """Scales belong to complete matrices: an all-reduce for each of the 10 weights, in every all-gather."""
    folder, seen = runs
    assert losses(folder / "true-in-fp8") == losses(folder / "true")
    plain, fp8 = (seen[name][0]["collectives"] for name in ("true", "true-in-fp8"))
    assert fp8["gloo:all_gather"] == plain["gloo:all_gather"]
    further = fp8["gloo:all_reduce"] - plain["gloo:all_reduce"]
    assert further > 0 and further % 10 == 0
