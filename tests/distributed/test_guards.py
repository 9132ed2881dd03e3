"""N4 and N7 across ranks: injected faults are detected on every rank."""

import pytest
from helpers.cases import has_slow_tests
from helpers.groups import Case, run_group


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def broken(tmp_path_factory, shared_flags, request):
    folder = tmp_path_factory.mktemp("guards")
    fsdp = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD"]
    sharded = [*fsdp, "--fsdp.state_dict_type", "sharded"]
    async_save = ["--train.async_save", "true"]
    cases = [
        Case("mesh", fsdp, fault="mesh"),
        Case("norms", [*fsdp, "--precision", "bf16-mixed"], fault="norms"),
        Case("nan-ddp", ["--strategy", "ddp", "--train.save_interval", "1"], fault="nan on rank 1"),
        Case("nan-fsdp", [*fsdp, "--train.save_interval", "1", *async_save], fault="nan on rank 1"),
        Case("inf", [*sharded, "--train.save_interval", "1"], fault="inf in a moment on rank 1"),
        Case("inf-async", [*sharded, "--train.save_interval", "1", *async_save], fault="inf in a moment on rank 1"),
        Case("search", [*sharded, "--train.save_interval", "2"], fault="the search for NaN fails on rank 1"),
        Case("forbidden", [*sharded, "--train.save_interval", "2"], fault="no permission on rank 1"),
        Case("forbidden-async", [*sharded, "--train.save_interval", "2", *async_save], fault="no permission on rank 1"),
    ]
    results = {}
    if not has_slow_tests(request):
        cases = [case for case in cases if case.name in ("mesh", "nan-fsdp")]
    for case in cases:  # one group per case: the failure ends it
        results |= run_group(folder, 2, [case], shared_flags)
    return folder, results


def output_of(folder, name) -> str:
    (work,) = [p.parent for p in folder.glob(f"group-*/0-{name}.json")]
    return "".join((work / f"{rank}.out").read_text() for rank in (0, 1))


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("mesh", "lm_head.weight"),
        slow("norms", "transformer.h.0.norm_1.weight"),
    ],
)
def test_n4_different_replicas_are_detected_after_the_first_step(broken, name, parameter):
    folder, results = broken
    assert [seen["exit"] for seen in results[name]] == [3, 3]
    text = output_of(folder, name)
    assert text.count("toolkit pretrain:") == 1 and parameter in text and "Traceback" not in text
    assert not list((folder / name).glob("*/COMPLETE"))


@pytest.mark.slow
def test_n4_callback_of_one_rank_leaves_replicas_equal(tmp_path, shared_flags):
    """A clipped gradient that is looked at is rounded to bf16, another one is not."""
    flags = ["--strategy", "ddp", "--precision", "bf16-true", "--train.max_norm", "0.01", "--train.max_steps", "1"]
    (ranks,) = run_group(tmp_path, 2, [Case("watched", flags, fault="a callback on rank 1")], shared_flags).values()
    assert [seen["exit"] for seen in ranks] == [0, 0], output_of(tmp_path, "watched")


@pytest.mark.slow
def test_n4_hybrid_replicas_clip_by_one_norm(tmp_path, shared_flags):
    """Different norms, as may happen in the last bit, must not make the replicas differ."""
    hybrid = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "HYBRID_SHARD", "--train.max_norm", "0.01"]
    case = Case("hybrid", hybrid, nodes=2, fault="norms that differ")
    (ranks,) = run_group(tmp_path, 4, [case], shared_flags).values()
    assert [seen["exit"] for seen in ranks] == [0] * 4, output_of(tmp_path, "hybrid")


@pytest.mark.parametrize("name", [slow("nan-ddp"), "nan-fsdp"])
def test_n7_nonfinite_loss_on_one_rank_stops_all(broken, name):
    folder, results = broken
    assert [seen["exit"] for seen in results[name]] == [3, 3]
    text = output_of(folder, name)
    assert text.count("toolkit pretrain:") == 1
    assert "step 3 is not finite" in text and "on rank 1, its samples" in text and "on rank 0" not in text
    assert sorted(p.parent.name for p in (folder / name).glob("*/COMPLETE")) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inf", "inf-async"])
def test_n7_nonfinite_optimizer_state_on_one_rank_is_not_saved(broken, name):
    folder, results = broken
    assert [seen["exit"] for seen in results[name]] == [3, 3]
    text = output_of(folder, name)
    assert text.count("toolkit pretrain:") == 1 and "step-00000003 was not saved: " in text and "|exp_avg_sq" in text
    assert sorted(p.name for p in (folder / name).glob("*step-*")) == ["step-00000001", "step-00000002"]


@pytest.mark.slow
def test_n7_failure_of_the_search_itself_ends_all_with_its_reason(broken):
    folder, results = broken
    assert [seen["exit"] for seen in results["search"]] == [1, 1]
    text = output_of(folder, "search")
    assert "toolkit pretrain: rank 1: RuntimeError: no memory for the search" in text
    assert "not saved" not in text and not list((folder / "search").glob("*step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forbidden", "forbidden-async"])
def test_s1_rank_without_write_permission_ends_all_with_one_line(broken, name):
    folder, results = broken
    assert [seen["exit"] for seen in results[name]] == [2, 2]
    text = output_of(folder, name)
    assert text.count("toolkit pretrain:") == 1 and "Traceback" not in text
    assert "--out_dir" in text and "rank 1 could not write" in text and "Permission denied" in text
    assert not list((folder / name).glob("*step-*"))


@pytest.mark.slow
def test_rank_that_cannot_read_its_data_stops_all_after_a_checkpoint(tmp_path, shared_flags):
    start, rest = shared_flags[:3], shared_flags[shared_flags.index("--train.global_batch_size") :]
    data = ["--data", "helpers.failing_data.Endless", "--data.vocab_size", "300", "--data.broken_at", "33"]
    case = Case("unreadable", ["--strategy", "fsdp"], fault="by the data")
    (ranks,) = run_group(tmp_path, 2, [case], [*start, *data, *rest]).values()
    assert [seen["exit"] for seen in ranks] == [3, 3]
    text = output_of(tmp_path, "unreadable")
    assert text.count("shard-7.parquet: is damaged") == 1 and "Traceback" not in text
    assert "step-00000004 is saved; resume with --resume auto" in text
