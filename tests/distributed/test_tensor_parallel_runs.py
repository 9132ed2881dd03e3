"""Tensor parallelism beyond pretraining in fp32: finetuning, bf16, validation."""

import pytest
from helpers.compare_runs import column, copy_without, losses, relative, trained
from helpers.groups import Case, run_group

TENSOR = ["--tensor_parallel_size", "2"]


@pytest.mark.slow
def test_n3_bf16(tmp_path, shared_flags):
    mixed = ["--precision", "bf16-mixed"]
    splits = [Case(f"split-{n}", [*mixed, "--train.micro_batch_size", str(n)]) for n in (4, 8)]
    run_group(tmp_path, 1, [Case("one", mixed), *splits], shared_flags)
    run_group(tmp_path, 2, [Case("two", [*mixed, *TENSOR])], shared_flags)
    run_group(tmp_path, 4, [Case("2x2", [*mixed, *TENSOR])], shared_flags)

    def difference(name: str) -> float:
        return relative(losses(tmp_path / name), losses(tmp_path / "one"))

    # A few of bf16's relative steps of 2^-8 in each logit, averaged over the tokens; splits alone can be luckier.
    allowed = max(2 * max(difference(case.name) for case in splits), 3e-4)
    assert 0 < allowed < 2e-3 and max(difference("two"), difference("2x2")) <= allowed


@pytest.mark.slow
def test_offloaded_shards(tmp_path, shared_flags):
    same = ["--precision", "32-true", *TENSOR]
    offloaded = Case("offloaded", [*same, "--fsdp.cpu_offload", "true"], fault="offload on a CPU")
    seen = run_group(tmp_path, 2, [Case("plain", same), offloaded], shared_flags)
    assert seen["offloaded"][0]["exit"] == 0 and losses(tmp_path / "offloaded") == losses(tmp_path / "plain")


PACKED = ["--data.packing", "best_fit", "--train.max_seq_length", "48"]
ADAPTED = ["--lora_key", "true", "--lora_mlp", "true", "--lora_projection", "true", "--lora_dropout", "0"]
FINETUNING = {
    "full": ("finetune_full", []),
    "packed": ("finetune_full", PACKED),
    "lora": ("finetune_lora", [*ADAPTED, "--lora_head", "true"]),
    "dora": ("finetune_lora", [*ADAPTED, "--lora_dora", "true"]),
}


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory, finetuning_flags):
    """Ragged, masked rows, with a validation and a sample in the run; adapters also resume from one process."""
    folder = tmp_path_factory.mktemp("finetuning-tensor")
    shared = [
        *finetuning_flags(tmp_path_factory.mktemp("tensor-base"), intermediate_size=160, tie_embeddings=False),
        "--precision", "32-true", "--train.micro_batch_size", "2", "--eval.max_new_tokens", "4",
        "--data.val_split_fraction", "0.2",
    ]  # fmt: skip
    for size, layout in {1: [], 2: TENSOR, 4: TENSOR}.items():
        names = FINETUNING if size < 4 else ("full", "dora")
        cases = [Case(f"{name}-{size}", [*FINETUNING[name][1], *layout], command=FINETUNING[name][0]) for name in names]
        if size == 2:
            copy_without(folder / "dora-1", folder / "dora-resumed", "step-00000008", "final")
            command, words = FINETUNING["dora"]
            cases.append(Case("dora-resumed", [*words, *layout, "--resume", "auto"], command=command))
        run_group(folder, size, cases, shared)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{name}-2" for name in FINETUNING), "full-4", "dora-4", "dora-resumed"])
def test_n3_finetuning(finetuned, name):
    kind = name.partition("-")[0]
    folders = (finetuned / name, finetuned / f"{kind}-1")
    for key in ("loss", "val_loss", "grad_norm"):
        found, expected = (column(folder, key) for folder in folders)
        assert len(expected) >= 2 and found == pytest.approx(expected, rel=2e-5), key
    if FINETUNING[kind][0] == "finetune_lora":
        found, expected = ({key: value.shape for key, value in trained(folder).items()} for folder in folders)
        assert found == expected


@pytest.mark.slow
def test_verify_parallel(tmp_path, shared_flags):
    steps = shared_flags.index("--train.max_steps")
    words = [*shared_flags[:steps], *shared_flags[steps + 2 :]]
    verified = Case("verified", ["--precision", "32-true", *TENSOR], command="verify_parallel pretrain")
    run_group(tmp_path, 2, [verified], words)
