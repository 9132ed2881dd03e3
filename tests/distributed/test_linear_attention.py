"""N3 and S2 for linear attention: packed rows train equally on 1, 2 and 4 ranks, in any layout, and after a resume."""

import pytest
from helpers.compare_runs import copy_without, losses, relative, require_close, require_same
from helpers.groups import Case, run_group

MODEL = {
    "family": "qwen3_5_text", "norm_offset": True, "norm_qk": True, "attention_gate": True, "tie_embeddings": False,
    "linear_attention": {"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 16, "conv_size": 4},
    "linear_attention_indices": [1, 0],
}  # fmt: skip
FSDP, SPLIT, MIXED = ["--strategy", "fsdp"], ["--train.micro_batch_size", "4"], ["--precision", "bf16-mixed"]
CASES = {
    1: {
        "one": [],
        "split": SPLIT,
        "selective": ["--train.activation_checkpointing", "selective"],
        "full": ["--train.activation_checkpointing", "full"],
        "compiled": ["--compiler", "torch"],
        "mixed": MIXED,
        "mixed-split": [*MIXED, *SPLIT],
        "bf16-true": ["--precision", "bf16-true"],
    },
    2: {
        "ddp": ["--strategy", "ddp"],
        "fsdp": FSDP,
        "fsdp-compiled": [*FSDP, "--compiler", "torch", "--train.activation_checkpointing", "selective"],
        "fsdp-mixed": [*FSDP, *MIXED],
    },
    4: {"ddp-4": ["--strategy", "ddp"], "fsdp-4": [*FSDP, "--fsdp.state_dict_type", "sharded"]},
}


def case(name: str, *flags: str) -> Case:
    fault = "compile with the eager backend" if "--compiler" in flags else None
    return Case(name, [*flags], command="finetune_full", fault=fault)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, finetuning_flags):
    folder = tmp_path_factory.mktemp("linear")
    packed = ["--data.packing", "best_fit", "--train.max_seq_length", "48", "--precision", "32-true"]
    packed += ["--train.learning_rate", "1e-3"]
    shared = [*finetuning_flags(folder / "base", **MODEL), *packed]
    for size, cases in CASES.items():
        run_group(folder, size, [case(name, *flags) for name, flags in cases.items()], shared)
        again = {f"{name}-resumed": flags for name, flags in cases.items() if name in ("one", "fsdp", "fsdp-4")}
        for name in again:
            copy_without(folder / name.removesuffix("-resumed"), folder / name, "step-00000008", "final")
        run_group(folder, size, [case(name, *flags, "--resume", "auto") for name, flags in again.items()], shared)
    return folder


@pytest.mark.slow
def test_n3_layouts_and_splits_in_fp32(folder):
    assert losses(folder / "one")[-1] < losses(folder / "one")[0] - 0.1
    for name in ("split", "compiled", "ddp", "fsdp", "fsdp-compiled", "ddp-4", "fsdp-4"):
        assert "transformer.h.0.attn.A_log" in require_close(folder / name, folder / "one")


@pytest.mark.slow
def test_s2_resumed_and_checkpointed_runs_are_bit_equal(folder):
    for name in ("selective", "full", "one-resumed"):
        require_same(folder / name, folder / "one")
    for name in ("fsdp", "fsdp-4"):
        require_same(folder / f"{name}-resumed", folder / name)


@pytest.mark.slow
def test_n3_in_bf16(folder):
    """As near to fp32 as one process; FSDP also rounds the decays and the convolution."""
    exact = losses(folder / "one")
    rounded = {name: relative(losses(folder / name), exact) for name in ("mixed", "mixed-split", "fsdp-mixed")}
    assert 0 < rounded["mixed"] < 5e-3 and max(rounded.values()) <= 3 * rounded["mixed"], rounded
    assert relative(losses(folder / "bf16-true"), exact) < 5e-2
