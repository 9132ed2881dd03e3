"""Runs that distill a teacher: one curve in every split and layout, exact resume, and mistakes as one line."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers.cases import has_slow_tests
from helpers.groups import Case, run_group
from helpers.small_runs import text_data, write_base, write_rows

from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.ui.loggers import read_metrics

STEPS, FSDP = 4, ["--strategy", "fsdp"]
JSD = ["--objective.divergence", "jsd", "--objective.temperature", "2", "--objective.label_weight", "0.25"]
ALWAYS = ("1", "split", "2-fsdp", "lora-1")


def cases(size: int, folder: Path) -> list[Case]:
    teacher = ["--objective", "Distillation", "--objective.teacher_dir"]
    pretrain = ["pico-llama", "--train.save_interval", "2", *text_data(folder / "corpus"), *teacher]
    untied = [*pretrain, str(folder / "untied"), *JSD]
    pretrain += [str(folder / "teacher")]
    rows = ["--data", "JSON", "--data.json_path", str(folder / "rows.jsonl"), "--data.prompt_style", "plain"]
    lora = [str(folder / "student"), *rows, "--lora_head", "true", *teacher, str(folder / "teacher"), *JSD]
    if size == 1:
        return [
            Case("1", pretrain), Case("split", [*pretrain, "--train.micro_batch_size", "4"]), Case("untied-1", untied),
            Case("lora-1", lora, command="finetune_lora"), Case("16-bit-1", [*pretrain, "--precision", "bf16-mixed"]),
        ]  # fmt: skip
    return [
        Case("2-fsdp", [*pretrain, *FSDP]), Case("2-ddp", [*pretrain, "--strategy", "ddp"]),
        Case("untied-2", [*untied, *FSDP, "--train.tie_embeddings", "true"]),
        Case("lora-2", [*lora, *FSDP], command="finetune_lora"),
        Case("16-bit-2", [*pretrain, "--precision", "bf16-mixed", *FSDP]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus) -> Path:
    """A teacher with some training, one with a head that is not tied, and a student to adapt."""
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "corpus").symlink_to(corpus)
    for name in ("base", "untied", "student"):
        (folder / name).mkdir()
    write_base(folder / "base", corpus, n_layer=3, intermediate_size=192)
    write_base(folder / "untied", corpus, n_layer=1, tie_embeddings=False)
    write_base(folder / "student", corpus)
    write_rows(folder)
    words = ["--initial_checkpoint_dir", str(folder / "base"), *text_data(corpus), "--train.max_steps", "15"]
    assert main(["pretrain", *words, *SHARED, "--train.micro_batch_size", "8", "--out_dir", str(folder / "t")]) == 0
    shutil.copytree(folder / "t" / "final", folder / "teacher")
    return folder


SHARED = [
    "--accelerator", "cpu", "--train.global_batch_size", "8", "--train.max_seq_length", "32", "--train.learning_rate",
    "1e-2", "--train.lr_schedule", "constant", "--train.lr_warmup_steps", "0", "--eval.interval", "2",
    "--eval.max_new_tokens", "0", "--eval.max_iters", "2",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(folder, request) -> Path:
    shared = [*SHARED, "--train.micro_batch_size", "2", "--train.max_steps", str(STEPS)]
    everything = has_slow_tests(request)
    for size in (1, 2):
        run_group(folder, size, [c for c in cases(size, folder) if everything or c.name in ALWAYS], shared)
    return folder


def curve(out: Path) -> list[dict[str, float]]:
    names = {"loss", "divergence", "next_token", "grad_norm", "val_loss", "val_divergence", "val_next_token"}
    return [{n: v for n, v in row.items() if n in names} for row in read_metrics(out / "logs" / "metrics.csv")]


@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("split", "1"), ("2-fsdp", "1"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("2-ddp", "1"), ("untied-2", "untied-1"), ("lora-2", "lora-1"))
        ),
    ],
)  # fmt: skip
def test_n3_one_curve_in_every_split_and_layout(runs, name, one):
    rows, expected = curve(runs / name), curve(runs / one)
    assert len(rows) == STEPS and ("untied" in name or rows[-1]["divergence"] < rows[0]["divergence"])
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4, nan_ok=True)
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_n3_bf16_is_one_curve(runs):
    """The teacher's weights are in bf16 as well."""
    for name in ("16-bit-1", "16-bit-2"):
        losses = [row["loss"] for row in curve(runs / name)]
        assert losses == pytest.approx([row["loss"] for row in curve(runs / "1")], rel=1e-2)


def test_the_loss_is_that_of_the_formula(runs):
    """Also in validation: the student's final weights on a row of the corpus, against plain logits."""
    for row in curve(runs / "lora-1"):
        assert row["loss"] == pytest.approx(0.75 * 4 * row["divergence"] + 0.25 * row["next_token"], rel=1e-6)
    for row in curve(runs / "1"):
        assert row["loss"] == pytest.approx(0.5 * row["divergence"] + 0.5 * row["next_token"], rel=1e-6)


def test_s2_a_resumed_run_is_bit_equal_and_its_teacher_may_have_moved(runs, tmp_path, capsys):
    words = next(case.flags for case in cases(1, runs) if case.name == "split")
    shutil.copytree(runs / "split", out := tmp_path / "out")
    shutil.rmtree(out / "final")
    shutil.copytree(runs / "teacher", tmp_path / "moved")
    words = [w.replace(str(runs / "teacher"), str(tmp_path / "moved")) for w in words]
    run = ["pretrain", *words, *SHARED, "--train.max_steps", str(STEPS), "--out_dir", str(out), "--resume"]
    assert main([*run, str(out / "step-00000002")]) == 0
    assert curve(out) == curve(runs / "split") or repr(curve(out)) == repr(curve(runs / "split"))
    weights, expected = load_weights(out / "final"), load_weights(runs / "split" / "final")
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
    shutil.rmtree(out / "final")
    capsys.readouterr()
    assert main([w.replace(str(tmp_path / "moved"), str(runs / "base")) for w in [*run, "auto"]]) == 2
    assert "--objective.teacher_dir: " in (err := capsys.readouterr().err) and "different weights" in err


def test_mistakes_are_one_line(folder, tmp_path, corpus, capsys, refusal, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, vocab_size in (("other", 290), ("adapters", 300)):
        (tmp_path / name).mkdir()
        write_base(tmp_path / name, corpus, vocab_size=vocab_size, block_size=16)
    (tmp_path / "adapters" / "lit_model.pth").rename(tmp_path / "adapters" / "lit_model.pth.lora")
    run = ["pretrain", "pico-llama", *text_data(corpus), *SHARED, "--train.max_steps", "1", "--objective"]
    distill = ["Distillation", "--objective.teacher_dir"]
    teacher = [*distill, str(folder / "teacher")]
    own = ["--tokenizer_dir", str(folder / "student")]
    cases = {
        ("Distillation",): "--objective.teacher_dir: must be given",
        (*distill, "nowhere"): "--objective.teacher_dir nowhere: no such folder",
        (*distill, str(corpus)): "holds no model_config.yaml",
        (*distill, "adapters"): "--objective.teacher_dir adapters: holds no lit_model.pth; run `toolkit merge_lora`",
        (*distill, "other", *own): "--objective.teacher_dir other: has another vocabulary than ",
        (*distill, "other"): "takes at most 16 tokens; lower it",
        (*teacher, "--objective.temperature", "0"): "--objective.temperature 0.0: must be greater than zero",
        (*teacher, "--objective.label_weight", "1"): "--objective.label_weight 1.0: must be at least 0 and less than 1",
        (*teacher, "--objective.beta", "0.1"): "beta 0.1: has no effect with --objective.divergence forward_kl",
        (*teacher, "--objective.divergence", "kl"): "--objective.divergence kl: ",
    }
    for words, message in cases.items():
        assert message in refusal(*run, *words)
    synthetic = ["pretrain", "pico-llama", "--data", "SyntheticTokens", "--data.vocab_size", "64", *SHARED]
    (folder / "untied" / "tokenizer.json").rename(folder / "tokenizer.json")
    assert main([*synthetic, "--train.max_steps", "1", "--objective", *distill, str(folder / "untied")]) == 2
    (folder / "tokenizer.json").rename(folder / "untied" / "tokenizer.json")
    assert "has 300 tokens, but the trained model has 64" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
