"""Finetuning on several ranks equals one process: ragged masked rows, packed rows, adapters only."""

import csv
import shutil

import pytest
import torch
from helpers.cases import has_slow_tests
from helpers.groups import Case, losses, run_group, run_uninterrupted_and_killed_twice
from helpers.small_runs import write_base, write_rows

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state, load_weights

EAGER = "compile with the eager backend"
MODES = ("none", "selective", "full")
FSDP = ["--strategy", "fsdp"]
LORA = {"command": "finetune_lora"}
ADAPTED = ["--lora_key", "true", "--lora_mlp", "true"]


def cases(size: int) -> list[Case]:
    found = []
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        flags = ["--precision", precision, *ADAPTED, *(FSDP if size > 1 else [])]
        found.append(Case(f"lora-{precision}-{size}", flags, **LORA))
    found.append(Case(f"dora-{size}", ["--lora_dora", "true", *(FSDP if size > 1 else [])], **LORA))
    quantized = ["--quantize", "bnb.nf4", *(FSDP if size > 1 else [])]
    found.append(Case(f"qlora-{size}", quantized, **LORA))
    found.append(Case(f"full-{size}", FSDP if size > 1 else [], command="finetune_full"))
    packed = ["--data.packing", "best_fit", "--train.max_seq_length", "48"]
    found.append(Case(f"packed-{size}", [*packed, *(FSDP if size > 1 else [])], command="finetune_full"))
    if size == 2:
        found.append(Case("qlora-ddp", ["--quantize", "bnb.nf4", "--strategy", "ddp"], **LORA))
        accumulated = [*ADAPTED, *FSDP, "--fsdp.accumulate", "sharded"]
        found.append(Case("lora-accumulate", accumulated, **LORA))
        checkpointed = ["--train.activation_checkpointing", "full"]
        found.append(Case("lora-32-true-full", [*ADAPTED, *FSDP, *checkpointed], **LORA))
        found.append(Case("qlora-sharded", [*FSDP, "--quantize", "bnb.nf4", *checkpointed], **LORA))
        found.append(Case("qlora-compiled", [*FSDP, "--quantize", "bnb.nf4", "--compiler", "torch"], **LORA))
        wrapped = ["--fsdp.auto_wrap", "size", "--fsdp.min_num_params", "5000"]
        found.append(Case("qlora-wrapped", [*FSDP, "--quantize", "bnb.nf4", *wrapped], **LORA))
        for precision in ("bf16-true", "bf16-mixed"):
            flags = [*FSDP, "--quantize", "bnb.nf4-dq", "--precision", precision]
            found.append(Case(f"qlora-{precision}-2", flags, **LORA))
        mixed = [*FSDP, "--precision", "bf16-mixed", "--train.micro_batch_size", "2", "--eval.interval", "0"]
        found.append(Case("ragged-plain", mixed, command="finetune_full"))
        for mode in MODES:
            flags = [*mixed, "--compiler", "torch", "--train.activation_checkpointing", mode]
            name = f"ragged-compiled-{mode}"
            found.append(Case(name, flags, fault=EAGER, look_at="graphs", command="finetune_full"))
    if size == 1:
        for precision in ("bf16-true", "bf16-mixed"):  # another micro-batch split: the tolerance of bf16
            flags = ["--precision", precision, *ADAPTED, "--train.micro_batch_size", "4"]
            found.append(Case(f"split-{precision}", flags, **LORA))
            quantized = ["--quantize", "bnb.nf4-dq", "--precision", precision]
            found.append(Case(f"qlora-{precision}-1", quantized, **LORA))
            found.append(Case(f"split-qlora-{precision}", [*quantized, "--train.micro_batch_size", "4"], **LORA))
    else:
        found.append(Case("ddp-2", [*ADAPTED, "--strategy", "ddp"], **LORA))
    return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory, corpus) -> list[str]:
    # the size is a multiple of 64, for QLoRA
    folder = write_base(tmp_path_factory.mktemp("finetuning-input"), corpus, intermediate_size=192)
    write_rows(folder)
    return [
        str(folder), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(folder / "rows.jsonl"),
        "--data.prompt_style", "plain", "--train.global_batch_size", "8", "--train.micro_batch_size", "1",
        "--train.max_steps", "8", "--train.learning_rate", "1e-2", "--train.lr_schedule", "constant",
        "--train.save_interval", "4", "--eval.interval", "4", "--eval.max_new_tokens", "0",
    ]  # fmt: skip


ALWAYS = ("lora-32-true-1", "lora-32-true-2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shared, request):
    folder = tmp_path_factory.mktemp("finetuning")
    everything = has_slow_tests(request)
    seen = {}
    for size in (1, 2):
        seen |= run_group(folder, size, [c for c in cases(size) if everything or c.name in ALWAYS], shared)
    if not everything:
        return folder, seen
    again = [
        Case(f"{source}-on-2", [*ADAPTED, *FSDP, "--resume", "auto"], **LORA)
        for source in ("lora-32-true-1", "lora-32-true-2")
    ]
    for case in again:
        shutil.copytree(folder / case.name.removesuffix("-on-2"), folder / case.name)
        for later in ("step-00000008", "final"):
            shutil.rmtree(folder / case.name / later, ignore_errors=True)
    seen |= run_group(folder, 2, again, shared)
    return folder, seen


def relative(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b) == 8
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def val_losses(folder) -> list[float]:
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        return [float(row["val_loss"]) for row in csv.DictReader(file) if row["val_loss"]]


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["lora-32-true", slow("dora"), slow("qlora"), slow("full"), slow("packed")])
def test_n3_two_ranks_finetune_as_one_does(runs, name):
    folder, _ = runs
    one, two = folder / f"{name}-1", folder / f"{name}-2"
    assert relative(losses(two), losses(one)) < 1e-5
    assert val_losses(two) == pytest.approx(val_losses(one), rel=1e-5) and len(val_losses(two)) == 2
    read = load_weights if name in ("full", "packed") else lambda path: load_state(path / ADAPTERS)
    adapters, reference = read(two / "final"), read(one / "final")
    assert adapters.keys() == reference.keys()
    for key in reference:
        assert (adapters[key] - reference[key]).norm() <= 2e-4 * reference[key].norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ragged_rows_are_compiled_once_while_gradients_accumulate_under_fsdp(runs, mode):
    """A graph that is made in the second micro-batch finds a waiting gradient in fp32 for a weight in bf16."""
    folder, seen = runs
    name = f"ragged-compiled-{mode}"
    for rank in seen[name]:
        assert rank["exit"] == 0
        first, *later = rank["graphs"]
        assert first > 0 and len(later) > 2 and set(later) == {first}, rank["graphs"]
    assert relative(losses(folder / name), losses(folder / "ragged-plain")) < 1e-3


@pytest.mark.slow
def test_n3_adapters_under_ddp_and_with_sharded_gradients(runs):
    folder, _ = runs
    for name, one in (("ddp-2", "lora-32-true-1"), ("qlora-ddp", "qlora-1"), ("lora-accumulate", "lora-32-true-1")):
        assert relative(losses(folder / name), losses(folder / one)) < 1e-5, name


@pytest.mark.slow
def test_checkpointed_adapters_change_no_bit(runs):
    folder, _ = runs
    assert losses(folder / "lora-32-true-full") == losses(folder / "lora-32-true-2")


@pytest.mark.slow
def test_n3_4_bit_base_is_sharded(runs):
    folder, seen = runs
    for run in ("qlora-sharded", "qlora-wrapped", "qlora-compiled"):
        assert relative(losses(folder / run), losses(folder / "qlora-1")) < 1e-5
    adapters, reference = (load_state(folder / run / "final" / ADAPTERS) for run in ("qlora-sharded", "qlora-1"))
    assert all((adapters[key] - reference[key]).norm() <= 2e-4 * reference[key].norm() for key in reference)
    for rank in seen["qlora-sharded"]:
        assert rank["parameters"] == pytest.approx(seen["qlora-1"][0]["parameters"] / 2, rel=0.02)
        assert rank["dtypes"] == ["torch.float32"]  # not uint8, which FSDP shards only with torch 2.12


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_n3_in_bf16(runs, kind, precision):
    folder, _ = runs
    one = losses(folder / f"{kind}-{precision}-1")
    allowed = 2 * relative(losses(folder / f"split-{'qlora-' * (kind == 'qlora')}{precision}"), one)
    assert relative(losses(folder / f"{kind}-{precision}-2"), one) <= max(allowed, 1e-6)


@pytest.mark.parametrize("precision", ["32-true", slow("bf16-true"), slow("bf16-mixed")])
def test_base_and_adapters_are_sharded_and_only_adapters_have_gradients(runs, precision):
    folder, seen = runs
    adapters = load_state(folder / f"lora-{precision}-2" / "final" / ADAPTERS)
    adapter_bytes = sum(tensor.nbytes for tensor in adapters.values())
    unsharded = seen[f"lora-{precision}-1"][0]["parameters"]
    norms = 5 * 64 * 4 if precision == "bf16-mixed" else 0  # replicated on every rank
    for rank in seen[f"lora-{precision}-2"]:
        assert rank["waiting"] == adapter_bytes == pytest.approx(2 * rank["gradients"], rel=0.02)
        assert rank["moments"] == pytest.approx(adapter_bytes, rel=0.02)
        assert rank["parameters"] == pytest.approx((unsharded - norms) / 2 + norms, rel=0.02)
        dtype = "torch.bfloat16" if precision == "bf16-true" else "torch.float32"
        assert rank["dtypes"] == sorted({dtype, "torch.float32"})


@pytest.mark.slow
def test_s2_adapters_resume_on_one_rank_and_on_two(runs):
    folder, _ = runs
    same, other = folder / "lora-32-true-2-on-2", folder / "lora-32-true-1-on-2"
    assert losses(same) == losses(folder / "lora-32-true-2")
    adapters, reference = (load_state(path / "final" / ADAPTERS) for path in (same, folder / "lora-32-true-2"))
    assert all(torch.equal(adapters[name], reference[name]) for name in reference)
    assert relative(losses(other), losses(folder / "lora-32-true-1")) < 1e-5


@pytest.mark.slow
def test_s2_lora_run_after_two_sigkills_is_bit_equal(tmp_path, shared):
    words = ["finetune_lora", *shared, "--lora_dropout", "0.1", "--devices", "2", *FSDP]
    words += ["--train.activation_checkpointing", "selective"]
    run_uninterrupted_and_killed_twice(words, tmp_path)
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    adapters, reference = (load_state(tmp_path / run / "final" / ADAPTERS) for run in ("killed", "uninterrupted"))
    assert all(torch.equal(adapters[name], reference[name]) for name in reference)
