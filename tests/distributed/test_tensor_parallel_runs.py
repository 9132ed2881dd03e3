"""Tensor parallelism beyond pretraining in fp32: checkpoints, finetuning, bf16, validation, kills."""

import csv
import shutil

import pytest
import torch
from helpers.groups import Case, losses, run_group, run_uninterrupted_and_killed_twice
from helpers.small_runs import write_base, write_rows

from toolkit.checkpoints.adapters import ADAPTERS
from toolkit.checkpoints.weights import load_state, load_weights

TENSOR = ["--tensor_parallel_size", "2"]
LAYOUTS = {
    "1": (1, ["--strategy", "auto"]), "fsdp-2": (2, ["--strategy", "fsdp2"]), "tp-2": (2, TENSOR), "tp-2x2": (4, TENSOR)
}  # fmt: skip
FORMATS = ["full", "sharded"]
RESUMES = [(a, b, kind) for a in LAYOUTS for b in LAYOUTS for kind in FORMATS if "tp" in a + b]


def saving(kind: str) -> list[str]:
    return ["--fsdp.state_dict_type", kind, "--train.save_interval", "7", "--train.keep_last", "0"]


def flags(layout: str, kind: str) -> list[str]:
    return ["--precision", "32-true", *saving(kind), *LAYOUTS[layout][1]]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, shared_flags, request):
    """Train 20 steps on each layout in each format; then resume on the others from step 7."""
    folder = tmp_path_factory.mktemp("resume-tensor")
    items = [item for item in request.session.items if item.path == request.path]
    wanted = sorted(item.callspec.params["case"] for item in items if item.originalname == "test_s2_resume")
    for size in (1, 2, 4):
        sources = sorted({(source, kind) for source, _, kind in wanted if LAYOUTS[source][0] == size})
        run_group(folder, size, [Case(f"{a}-{kind}", flags(a, kind)) for a, kind in sources], shared_flags)
    for size in (1, 2, 4):
        again = []
        for source, target, kind in wanted:
            if LAYOUTS[target][0] == size:
                out = f"{source}-{kind}-on-{target}"
                shutil.copytree(folder / f"{source}-{kind}", folder / out)
                for later in ("step-00000014", "final"):
                    shutil.rmtree(folder / out / later)
                again.append(Case(out, [*flags(target, kind), "--resume", "auto"]))
        run_group(folder, size, again, shared_flags)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMES, ids="-".join)
def test_s2_resume(resumed, case):
    source, target, kind = case
    first, continued = resumed / f"{source}-{kind}", resumed / f"{source}-{kind}-on-{target}"
    assert (continued / "step-00000007" / "lit_model.pth").is_dir() == (kind == "sharded")
    weights, reference = load_weights(continued / "final"), load_weights(first / "final")
    assert weights.keys() == reference.keys()
    if source == target:
        assert losses(continued) == losses(first)
        assert all(torch.equal(weights[name], reference[name]) for name in reference)
    assert losses(continued) == pytest.approx(losses(first), rel=1e-5)
    for name in reference:
        assert (weights[name] - reference[name]).norm() <= 2e-4 * reference[name].norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_s2_run_after_two_sigkills_is_bit_equal(corpus, tmp_path, shared_flags, kind):
    words = ["pretrain", *shared_flags, *flags("tp-2", kind), "--devices", "2", "--train.async_save", "true"]
    run_uninterrupted_and_killed_twice(words, tmp_path)
    assert losses(tmp_path / "killed") == losses(tmp_path / "uninterrupted")
    weights, reference = (load_weights(tmp_path / name / "final") for name in ("killed", "uninterrupted"))
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


@pytest.mark.slow
def test_n3_bf16(tmp_path, shared_flags):
    mixed = ["--precision", "bf16-mixed"]
    splits = [Case(f"split-{n}", [*mixed, "--train.micro_batch_size", str(n)]) for n in (4, 8)]
    run_group(tmp_path, 1, [Case("one", mixed), *splits], shared_flags)
    run_group(tmp_path, 2, [Case("two", [*mixed, *TENSOR])], shared_flags)
    run_group(tmp_path, 4, [Case("2x2", [*mixed, *TENSOR])], shared_flags)

    def difference(name: str) -> float:
        pairs = zip(losses(tmp_path / name), losses(tmp_path / "one"), strict=True)
        return max(abs(a - b) / b for a, b in pairs)

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
def finetuned(tmp_path_factory, corpus):
    """Ragged, masked rows, with a validation and a sample in the run; adapters also resume from one process."""
    folder = tmp_path_factory.mktemp("finetuning-tensor")
    base = write_base(tmp_path_factory.mktemp("tensor-base"), corpus, tie_embeddings=False)
    write_rows(folder)
    shared = [
        str(base), "--accelerator", "cpu", "--precision", "32-true", "--data", "JSON",
        "--data.json_path", str(folder / "rows.jsonl"), "--data.prompt_style", "plain",
        "--train.global_batch_size", "8", "--train.micro_batch_size", "2", "--train.max_steps", "8",
        "--train.learning_rate", "1e-2", "--train.lr_schedule", "constant", "--train.save_interval", "4",
        "--eval.interval", "4", "--eval.max_new_tokens", "4", "--data.val_split_fraction", "0.2",
    ]  # fmt: skip
    for size, layout in {1: [], 2: TENSOR, 4: TENSOR}.items():
        names = FINETUNING if size < 4 else ("full", "dora")
        cases = [Case(f"{name}-{size}", [*FINETUNING[name][1], *layout], command=FINETUNING[name][0]) for name in names]
        if size == 2:
            shutil.copytree(folder / "dora-1", folder / "dora-resumed")
            for later in ("step-00000008", "final"):
                shutil.rmtree(folder / "dora-resumed" / later, ignore_errors=True)
            command, words = FINETUNING["dora"]
            cases.append(Case("dora-resumed", [*words, *layout, "--resume", "auto"], command=command))
        run_group(folder, size, cases, shared)
    return folder


def column(folder, name: str) -> list[float]:
    with open(folder / "logs" / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row[name]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{name}-2" for name in FINETUNING), "full-4", "dora-4", "dora-resumed"])
def test_n3_finetuning(finetuned, name):
    kind = name.partition("-")[0]
    folders = (finetuned / name, finetuned / f"{kind}-1")
    for key in ("loss", "val_loss", "grad_norm"):
        found, expected = (column(folder, key) for folder in folders)
        assert len(expected) >= 2 and found == pytest.approx(expected, rel=2e-5), key
    if FINETUNING[kind][0] == "finetune_lora":
        states = [load_state(folder / "final" / ADAPTERS) for folder in folders]
        found, expected = ({key: value.shape for key, value in state.items()} for state in states)
        assert found == expected


@pytest.mark.slow
def test_verify_parallel(tmp_path, shared_flags):
    steps = shared_flags.index("--train.max_steps")
    words = [*shared_flags[:steps], *shared_flags[steps + 2 :]]
    verified = Case("verified", ["--precision", "32-true", *TENSOR], command="verify_parallel pretrain")
    run_group(tmp_path, 2, [verified], words)
