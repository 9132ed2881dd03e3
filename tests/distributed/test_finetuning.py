"""Finetuning on several ranks equals one process: ragged masked rows, packed rows, adapters only."""

import pytest
from helpers.cases import has_slow_tests
from helpers.compare_runs import column, copy_without, losses, relative, require_close, require_same
from helpers.groups import Case, run_group

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state

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
def shared(tmp_path_factory, finetuning_flags) -> list[str]:
    return finetuning_flags(tmp_path_factory.mktemp("finetuning-input"))


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
        copy_without(folder / case.name.removesuffix("-on-2"), folder / case.name, "step-00000008", "final")
    seen |= run_group(folder, 2, again, shared)
    return folder, seen


def slow(name: str):
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", ["lora-32-true", slow("dora"), slow("qlora"), slow("full"), slow("packed")])
def test_n3_two_ranks_finetune_as_one_does(runs, name):
    folder, _ = runs
    one, two = folder / f"{name}-1", folder / f"{name}-2"
    require_close(two, one)
    validated = column(two, "val_loss")
    assert validated == pytest.approx(column(one, "val_loss"), rel=1e-5) and len(validated) == 2


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
        require_close(folder / run, folder / "qlora-1")
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
    require_same(folder / "lora-32-true-2-on-2", folder / "lora-32-true-2")
    assert relative(losses(folder / "lora-32-true-1-on-2"), losses(folder / "lora-32-true-1")) < 1e-5
