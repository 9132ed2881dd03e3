"""``--dry_run``: everything up to the first step, and nothing in out_dir."""

import json
import re

import pytest
import yaml
from helpers.cases import check_each
from helpers.small_runs import text_data, write_base, write_rows

import toolkit
from toolkit.cli import main
from toolkit.distributed import rendezvous

SHORT = ["--accelerator", "cpu", "--train.max_steps", "3", "--train.global_batch_size", "8", "--train.micro_batch_size"]
SHORT += ["2", "--train.max_seq_length", "32", "--eval.max_new_tokens", "0"]


def tree(folder):
    return {path: path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def test_shows_rows_plan_and_outputs_and_writes_nothing(corpus, tmp_path, capsys, refusal):
    out = tmp_path / "out"
    words = ["pretrain", "pico-llama", *text_data(corpus), *SHORT, "--out_dir", str(out)]
    assert main([*words, "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert not out.exists()
    for line in (
        r"Tokenizer: .*300 tokens", "Sample 3: ", r"train rows +\d+", "Batch      8 = micro batch 2 x 1 device x 4",
        rf"Would write to {out} \(a new run\)", r"final/ +the model after step 3\n", "nothing was trained",
    ):  # fmt: skip
        assert re.search(line, shown), line

    assert main(words) == 0
    hyperparameters = yaml.safe_load((out / "final" / "hyperparameters.yaml").read_text())
    assert "dry_run" not in hyperparameters and "seed" in hyperparameters
    (out / "loss.png").unlink(missing_ok=True)  # a finished run would draw it
    before = tree(out)
    capsys.readouterr()
    assert main([*words, "--dry_run", "--resume", "auto"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main([*words, "--dry_run", "--resume", "auto", "--train.max_steps", "5"]) == 0
    shown = capsys.readouterr().out
    assert f"resumed from {out / 'final'}" in shown and "after step 5" in shown
    assert tree(out) == before
    assert "--resume auto continues it" in refusal(*words, "--dry_run")


@pytest.mark.parametrize("kind", ["packed", "pairs", "rated"])
def test_shows_the_labels_of_finetuning_rows(kind, corpus, tmp_path, capsys):
    (tmp_path / "base").mkdir()
    base, rows = write_base(tmp_path / "base", corpus), tmp_path / "rows.jsonl"
    if kind == "packed":
        rows, options = write_rows(tmp_path), ["--data.packing", "best_fit"]
    else:
        answer = {"chosen": "yes", "rejected": "no"} if kind == "pairs" else {"completion": "yes", "label": True}
        values = [{"prompt": f"{i}?"} | answer for i in range(20)]
        values = [v | ({"label": i % 2 == 0} if kind == "rated" else {}) for i, v in enumerate(values)]
        rows.write_text("".join(json.dumps(row) + "\n" for row in values))
        options = ["--objective", "DPO" if kind == "pairs" else "KTO"]
    words = ["finetune_lora", str(base), "--data.json_path", str(rows), "--data.prompt_style", "alpaca", *options]
    flags = [*SHORT, "--train.max_seq_length", "128", "--out_dir", str(tmp_path / "out"), "--dry_run"]
    assert main([*words, *flags]) == 0
    shown = capsys.readouterr().out
    answers = re.findall(r"^Sample \d: .*?: (\d+) of (\d+) tokens trained", shown, re.M)
    assert len(answers) == 3 and all(0 < int(trained) < int(tokens) for trained, tokens in answers)
    assert "Would write to" in shown and not (tmp_path / "out").exists()


def test_several_devices_are_rehearsed_in_one_process(corpus, tmp_path, capsys, monkeypatch):
    """Of any number of nodes, with and without a launcher's variables: nothing is started or waited for."""
    words = ["pretrain", "pico-llama", *text_data(corpus), *SHORT, "--out_dir", str(tmp_path / "out"), "--dry_run"]
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}

    def check(layout: str, environ: dict[str, str], devices: int) -> None:
        with monkeypatch.context() as patch:
            for name, value in environ.items():
                patch.setenv(name, value)
            assert main([*words, *layout.split(), "--train.global_batch_size", "16"]) == 0
        shown = capsys.readouterr().out
        assert not (tmp_path / "out").exists()
        if not devices:
            assert not shown
            return
        assert f"Devices    {devices} x cpu" in shown and f"16 = micro batch 2 x {devices} devices x" in shown
        assert f"Rank 0 of {devices} read its rows here" in shown and shown.count("Would write to") == 1

    check_each(check, [
        ("--devices 2", {}, 2),
        ("--devices 4 --num_nodes 2", {}, 8),
        ("--devices 4 --num_nodes 2", {"NODE_RANK": "1"}, 8),
        ("", torchrun, 0),  # the first process prints
        ("", torchrun | {"RANK": "0", "LOCAL_RANK": "0"}, 2),
    ])  # fmt: skip
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_open_to_publish", lambda *_: pytest.fail("waits for the first process"))
    assert main([*words, "--callbacks", "missing.Class"]) == 2
    assert capsys.readouterr().err.count("missing.Class: no such class") == 1


def test_wrong_data_ends_with_one_line(corpus, tmp_path, refusal):
    words = ["pretrain", "pico-llama", *text_data(corpus), *SHORT, "--out_dir", str(tmp_path / "out"), "--dry_run"]
    assert "the training data has only" in refusal(
        *words, "--train.global_batch_size", "1000000", "--train.micro_batch_size", "1"
    )
    assert "--dry_run true: has no effect in `toolkit plan`" in refusal("plan", *words)


def test_from_python(tmp_path):
    import torch

    rows = [torch.arange(17) for _ in range(32)]
    train = {"max_steps": 2, "global_batch_size": 4, "micro_batch_size": 2, "max_seq_length": 16}
    options = {"accelerator": "cpu", "out_dir": str(tmp_path / "out"), "train": train, "dry_run": True}
    result = toolkit.train("pico-llama", rows, model_config={"vocab_size": 300}, **options)
    assert result.step == 0 and not (tmp_path / "out").exists()
