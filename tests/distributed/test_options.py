"""Every strategy option reaches the wrapper, and a checkpoint is read once per node (M3)."""

import shutil

import pytest
from helpers.cases import has_slow_tests
from helpers.groups import Case, run_group

from toolkit import cli

FSDP = ["--strategy", "fsdp", "--train.max_steps", "2"]
DDP = ["--strategy", "ddp", "--train.max_steps", "2"]
STATIC = ["--ddp.static_graph", "true", "--train.micro_batch_size", "4"]


@pytest.fixture(scope="module")
def seen(tmp_path_factory, shared_flags, request):
    folder = tmp_path_factory.mktemp("options")
    cases = [
        Case("fsdp", FSDP),
        Case("mixed", [*FSDP, "--precision", "bf16-mixed"]),
        Case("fsdp-all", [
            *FSDP, "--precision", "bf16-mixed", "--fsdp.param_dtype", "fp32", "--fsdp.reduce_dtype", "bf16",
            "--fsdp.backward_prefetch", "none", "--fsdp.forward_prefetch", "true",
        ]),
        Case("bf16-true", [*FSDP, "--precision", "bf16-true", "--fsdp.reduce_dtype", "fp32"]),
        Case("ddp", DDP),
        Case("ddp-all", [*DDP, "--ddp.bucket_cap_mb", "1", "--ddp.gradient_as_bucket_view", "false"]),
        Case("ddp-unused", [*DDP, "--ddp.find_unused_parameters", "true"], fault="weights of the MLPs are not used"),
        Case("ddp-static", [*DDP, *STATIC], fault="weights of the MLPs are not used"),
    ]  # fmt: skip
    if not has_slow_tests(request):
        cases = [case for case in cases if case.name in ("mixed", "fsdp-all")]
    results = run_group(folder, 2, cases, shared_flags)
    return {name: ranks[1] for name, ranks in results.items()}


def test_n8_mixed_precision_keeps_reduction_and_master_weights_in_fp32(seen):
    block, root = ["torch.bfloat16", "torch.float32"], ["None", "torch.float32"]
    assert seen["mixed"]["options"]["dtypes"] == {"FSDPBlock": block, "FSDPGPT": root}
    assert seen["mixed"]["dtypes"] == ["torch.float32"]


def test_every_fsdp_option_reaches_the_units(seen):
    default, changed = seen["mixed"]["options"], seen["fsdp-all"]["options"]
    assert changed["dtypes"]["FSDPBlock"] == ["torch.float32", "torch.bfloat16"]
    assert default["prefetched"] == {"forward": {}, "backward": {}}  # in the backward pass torch prefetches one unit
    first, second = "transformer.h.0", "transformer.h.1"
    assert changed["prefetched"] == {
        "forward": {"": [first], first: [second]},
        "backward": {name: [name] for name in ("", first, second)},  # itself, so nothing ahead
    }


def test_values_without_an_effect_are_refused(capsys):
    for option, value, message in (
        ("limit_all_gathers", "false", "FSDP always limits them; remove it"),
        ("buffer_dtype", "bf16", "must be auto"),
        ("backward_prefetch", "post", "must be one of pre, none"),
    ):
        assert cli.main(["pretrain", f"--fsdp.{option}", value]) == 2
        assert capsys.readouterr().err == f"toolkit pretrain: --fsdp.{option} {value}: {message}\n"


@pytest.mark.slow
def test_bf16_true_keeps_explicit_dtypes(seen):
    assert seen["bf16-true"]["dtypes"] == ["torch.bfloat16"]
    assert seen["bf16-true"]["options"]["dtypes"]["FSDPBlock"] == ["None", "torch.float32"]


@pytest.mark.slow
def test_every_ddp_option_reaches_the_wrapper(seen):
    default = {"bucket_bytes": 25 * 2**20, "bucket_view": True, "find_unused": False, "static": False}
    assert seen["ddp"]["options"] == default
    assert seen["ddp-all"]["options"] == default | {"bucket_bytes": 2**20, "bucket_view": False}


@pytest.mark.slow
def test_ddp_trains_beside_weights_that_are_not_used(seen):
    """DDP alone would fail in the second step, where it still waits for gradients of the first."""
    assert seen["ddp-unused"]["exit"] == seen["ddp-static"]["exit"] == 0
    assert seen["ddp-unused"]["options"]["find_unused"] and seen["ddp-static"]["options"]["static"]
    unused = seen["ddp"]["moments"] - seen["ddp-unused"]["moments"]
    assert unused > seen["ddp"]["moments"] / 4


@pytest.mark.slow
def test_m3_full_checkpoint_is_read_once_per_node(tmp_path, shared_flags):
    """Four ranks of one node load 100 MB: about one copy in total, plus one or two units each while loading."""
    large = ["--model_config.n_embd", "512", "--model_config.n_layer", "8", "--model_config.intermediate_size", "1365"]
    once = [*large, "--train.max_steps", "1", "--train.global_batch_size", "4"]
    run_group(tmp_path, 1, [Case("source", once)], shared_flags)
    model_mb = (tmp_path / "source" / "final" / "lit_model.pth").stat().st_size / 2**20
    shutil.rmtree(tmp_path / "source" / "final" / "trainer")
    start = [flag for flag in shared_flags if flag != "pico-llama"]
    flags = ["--initial_checkpoint_dir", str(tmp_path / "source" / "final"), "--strategy", "fsdp", *once[6:]]
    # glibc returns blocks of real models to the kernel at once; at this size it needs a lower threshold.
    (ranks,) = run_group(
        tmp_path, 4, [Case("four", flags, look_at="memory")], start, MALLOC_MMAP_THRESHOLD_="1000000"
    ).values()
    held = sum(seen["model_mb"]["after"] for seen in ranks)
    peaks = [seen["model_mb"]["peak"] for seen in ranks]
    print(f"model {model_mb:.0f} MiB; four ranks hold {held:.0f} MiB; peaks {peaks}")
    assert held < 1.5 * model_mb
    assert sum(peaks) < 2.5 * model_mb
