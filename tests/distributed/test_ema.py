"""--train.ema on several ranks: one average under every strategy (N3), and an exact resume (S2)."""

import pytest
from helpers.cases import has_slow_tests, slow_except
from helpers.compare_runs import copy_without, require_close, require_same
from helpers.groups import Case, run_group

EMA = ["--train.ema", "0.8", "--train.max_steps", "8", "--train.save_interval", "3", "--train.keep_last", "0"]
SHARDED = ["--fsdp.state_dict_type", "sharded"]
PIPELINE = ["--pipeline_parallel_size", "2", "--model_config.n_layer", "2"]
LAYOUTS = {
    "one": (1, ["--strategy", "auto"]),
    "ddp": (2, ["--strategy", "ddp"]),
    "full": (2, []),
    "sharded": (2, SHARDED),
    "offloaded": (2, ["--fsdp.cpu_offload", "true"]),
    "tensor": (2, ["--tensor_parallel_size", "2"]),
    "tensor, sharded": (2, ["--tensor_parallel_size", "2", *SHARDED]),
    "context": (2, ["--context_parallel_size", "2"]),
    "tied": (1, ["--strategy", "auto", *PIPELINE[2:]]),
    "pipeline": (2, PIPELINE),
    "pipeline, sharded": (2, [*PIPELINE, *SHARDED]),
}
FAST = ["sharded"]
MOVES = [("sharded", "one"), ("one", "sharded"), ("tensor, sharded", "full"), ("full", "tensor"), ("tied", "pipeline")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared_flags, request):
    folder, is_slow = tmp_path_factory.mktemp("ema"), has_slow_tests(request)
    shared, names = [*shared_flags, *EMA], list(LAYOUTS) if is_slow else ["one", *FAST]
    moves = [(name, name) for name in (names if is_slow else FAST)] + (MOVES if is_slow else [])
    for size in (1, 2):
        run_group(folder, size, [Case(n, LAYOUTS[n][1]) for n in names if LAYOUTS[n][0] == size], shared)
    for size in (1, 2):
        again = []
        for source, target in moves:
            if LAYOUTS[target][0] == size:
                out = f"{source} on {target}"
                copy_without(folder / source, folder / out, "step-00000006", "final")
                again.append(Case(out, [*LAYOUTS[target][1], "--resume", "auto"]))
        run_group(folder, size, again, shared)
    return folder


@pytest.mark.parametrize("name", slow_except(FAST, list(LAYOUTS)))
def test_n3_s2_one_average_and_a_bit_equal_resume(runs, name):
    require_close(runs / name, runs / ("tied" if "pipeline" in name or name == "tied" else "one"))
    require_same(runs / f"{name} on {name}", runs / name)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), MOVES)
def test_s2_another_layout_continues_the_average(runs, source, target):
    require_close(runs / f"{source} on {target}", runs / source)
