"""`--eval.metric`: generated answers, log-probabilities of choices, several ranks, resuming, and failing functions."""

import csv
import json
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import processes
from helpers.cases import has_slow_tests
from helpers.groups import Case, run_group
from helpers.lm_eval_tasks import write_tasks
from helpers.small_runs import write_base
from helpers.talker import make_talker
from toolkit_metric.task_callback import columns_of

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.store import step_of
from toolkit.cli import main
from toolkit.data.tokenizer import Tokenizer
from toolkit.inference.generate import generate
from toolkit.inference.sampling import GREEDY

MODULE = textwrap.dedent("""
    import os, time, zlib

    def crc(answers, references, rows):
        crc = [zlib.crc32(answer.encode()) % 1000 for answer in answers]
        return {"crc": crc, "rows": len(rows), "none": [float("nan")] * len(rows)}

    def log_prob(log_probs, references, rows):
        return {"first": [values[0] for values in log_probs]}

    log_prob.needs_log_probs = log_prob.higher_is_better = True

    def fails_later(answers, references, rows):
        if len(answers) > 2:
            raise ValueError("too many rows")
        return {"m": 1}

    def sleeps_later(answers, references, rows):
        time.sleep(600 if len(answers) > 2 else 0)
        return {"m": 1}

    def is_killed_later(answers, references, rows):
        if len(answers) > 2:
            os.kill(os.getpid(), 9)
        return {"m": 1}

    def renames_later(answers, references, rows):
        return {"few" if len(answers) <= 2 else "many": 1}

    def loss(answers, references, rows):
        return {"loss": 1}
""")
ROWS = 90  # half of them are held out: 3 batches, so that one rank of two has one batch more


@pytest.fixture(scope="module")
def base(tmp_path_factory, corpus) -> Path:
    folder = write_base(tmp_path_factory.mktemp("base"), corpus)
    rows = [
        {"prompt": f"token {i}" + " and" * (i % 7), "completion": f"reads {'a line ' * (1 + i % 4)}", "choices": [
            f"reads {'a line ' * (1 + i % 4)}", "writes", "sleeps for a while"]}
        for i in range(ROWS)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def flags(base, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    (tmp_path / "my_metrics.py").write_text(MODULE)
    return [
        str(base), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", str(base / "rows.jsonl"),
        "--data.prompt_style", "plain", "--data.val_split_fraction", "0.5", "--train.global_batch_size", "4",
        "--train.micro_batch_size", "2", "--train.max_steps", "4", "--train.learning_rate", "1e-3",
        "--eval.interval", "2", "--eval.max_new_tokens", "0",
    ]  # fmt: skip


METRIC = ["--eval.metric", "my_metrics:crc,my_metrics:log_prob,choice", "--eval.metric_new_tokens", "12"]


VALIDATED = ("val_crc", "val_crc_stderr", "val_first", "val_first_stderr", "val_choice", "val_rows")


def columns(out: Path, *names: str) -> list[tuple[str, ...]]:
    with open(out / "logs" / "metrics.csv", newline="") as file:
        return [tuple(row[name] for name in names) for row in csv.DictReader(file)]


def measured(out: Path) -> list[tuple[str, ...]]:
    return columns(out, "step", *VALIDATED)


def answers(out: Path) -> list[dict]:
    lines = (out / "logs" / "answers.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def test_metrics_do_not_affect_training_are_resumed_and_decide(flags, tmp_path, capsys, monkeypatch):
    """With dropout, whose random numbers the answers must not change."""
    monkeypatch.setattr("toolkit_metric.answers._SLOW_START_S", 0.0)
    flags = [*flags, "--lora_dropout", "0.2", "--train.keep_best", "true", "--train.save_interval", "3"]
    assert main(["finetune_lora", *flags, "--out_dir", "without"]) == 0
    by_metric = [*flags, *METRIC, "--eval.best_by", "first", "--eval.initial_validation", "true"]
    assert main(["finetune_lora", *by_metric, "--out_dir", "with"]) == 0
    shown = capsys.readouterr().out
    assert "first -" in shown and "--eval.metric took " in shown
    assert "--eval.metric my_metrics:crc: still starting" in shown
    assert "best/ is the checkpoint with the highest val_first; see --eval.best_by and --eval.best_mode\n" in shown
    with_, without = tmp_path / "with", tmp_path / "without"
    losses = ("step", "loss", "val_loss")
    assert columns(with_, *losses)[1:] == columns(without, *losses)
    first = {int(step): float(value) for step, value in columns(with_, "step", "val_first") if value}
    assert list(first) == [0, 2, 4] and step_of(with_ / "best") == max(first, key=first.get)

    shutil.copytree(with_ / "step-00000003", tmp_path / "resumed" / "step-00000003")
    assert main(["finetune_lora", *by_metric, "--out_dir", "resumed", "--resume", "true"]) == 0
    assert measured(tmp_path / "resumed")[-1] == measured(with_)[-1]
    assert answers(tmp_path / "resumed") == answers(with_) and len(answers(with_)) == ROWS // 2

    # the finished adapters, by toolkit evaluate: what the last validation has
    capsys.readouterr()
    words = ["evaluate", "with/final", *METRIC, "--format", "json", "--accelerator", "cpu"]
    assert main([*words, "--trust_checkpoint_data", "true"]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert tuple(str(evaluated[name.removeprefix("val_")]) for name in VALIDATED) == measured(with_)[-1][1:]
    assert (evaluated["prompts"], evaluated["data"]) == (ROWS // 2, "JSON, val")

    # the oracles: other code that generates from a checkpoint, and the loss of a row
    final = tmp_path / "with" / "final"
    model, tokenizer, line = load_model(final).eval(), Tokenizer.load(final), answers(with_)[5]
    prompt = torch.tensor(tokenizer.encode(line["prompt"]))
    tokens = generate(model, prompt, max_new_tokens=12, sampling=GREEDY, eos_ids=[tokenizer.eos_id])
    assert line["answer"] == tokenizer.decode(list(tokens)) and line["step"] == 4 and line["none"] is None
    answer = torch.tensor(tokenizer.encode(line["reference"]))
    with torch.no_grad():
        logits = model(torch.cat([prompt, answer])[None])[0].log_softmax(-1)
    values = logits[len(prompt) - 1 : -1].gather(1, answer[:, None]).sum()
    assert line["first"] == pytest.approx(values.item(), rel=1e-5)
    assert line["log_probs"][0] == line["first"]


def test_pretraining_measures_prompts_of_a_file(base, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "TextFiles", "--data.train_data_path", str(corpus), "--data.vocab_size", "300"]
    flags += ["--train.max_seq_length", "32", "--train.max_steps", "1", "--train.global_batch_size", "4"]
    flags += ["--accelerator", "cpu", "--data.val_fraction", "0", "--out_dir", "run"]
    metric = ["--eval.metric", "rouge_l,exact_match", "--eval.metric_new_tokens", "5", "--eval.metric_rows", "3"]
    path = base / "rows.jsonl"
    assert main(["pretrain", "pico-llama", *flags, *metric, "--eval.metric_data", str(path)]) == 0
    assert columns(tmp_path / "run", "val_loss", "val_exact_match") == [("", "0.0")]
    assert [line["row"] for line in answers(tmp_path / "run")] == [f"{path} line {n}" for n in (1, 31, 61)]


def test_mistakes_are_one_line_before_training(flags, capsys):
    for more, message in (
        (["my_metrics:none"], "--eval.metric my_metrics:none: AttributeError: my_metrics has no none"),
        (["rouge_l", "--eval.metric_data", "none.json"], "--eval.metric_data none.json: no such file"),
        (["my_metrics:loss"], "--eval.metric my_metrics:loss: loss is also another metric; rename it"),
        (["crc,"], "--eval.metric crc: no such metric"),
        (["rouge_l", "--eval.interval", "0", "--eval.final_validation", "false"], "is not supported with a run"),
        (["rouge_l", "--data.val_split_fraction", "0"], "has no held-out rows with answers; give --eval.metric_data"),
        (["check:no-such-command"], "--eval.metric check:no-such-command: FileNotFoundError: "),
        (["reward:none"], "--eval.metric reward:none: checkpoint_dir none: no such folder"),
        ([f"reward:{flags[0]}"], f"--eval.metric reward:{flags[0]}: has no head; train one with toolkit finetune_full"),
        (
            ["my_metrics:crc", "--train.keep_best", "true", "--eval.best_by", "crc"],
            "--eval.best_by val_crc: does not say whether the highest or the lowest value is the best; add",
        ),
    ):  # fmt: skip
        capsys.readouterr()
        assert main(["finetune_full", *flags, "--out_dir", "bad", "--eval.metric", *more]) == 2, more
        error = capsys.readouterr().err.strip().splitlines()
        assert message in error[-1] and "Traceback" not in "".join(error)
        assert not Path("bad", "logs").exists()
    assert main(["finetune_full", *flags, "--out_dir", "bad", "--eval.metric", "my_metrics:renames_later"]) == 2
    changed = "--eval.metric: few is missing, but was returned for the first rows; always return the same names"
    assert changed in capsys.readouterr().err
    Path("asked.jsonl").write_text('{"prompt": "token"}\n' * 2)
    for metric in ("exact_match", "number", "rouge_l"):
        more = ["--eval.metric", metric, "--eval.metric_data", "asked.jsonl"]
        assert main(["finetune_full", *flags, "--out_dir", "asked", *more]) == 2
        line = f"--eval.metric {metric}: asked.jsonl line 1: has no answer to compare with; add one, or remove the row"
        assert line in capsys.readouterr().err


def test_s6_ranks_divide_the_prompts_and_agree_with_one(flags, tmp_path, request):
    """fsdp: in lockstep; ddp, with the slow tests: each rank generates alone, in whole batches."""
    assert main(["finetune_full", *flags, *METRIC, "--out_dir", "one"]) == 0
    strategies = {name: [*METRIC, "--strategy", name] for name in ("fsdp", "ddp")[: 1 + has_slow_tests(request)]}
    run_group(tmp_path, 2, [Case(name, more, command="finetune_full") for name, more in strategies.items()], flags)
    expected = measured(tmp_path / "one")
    assert len(set(expected[-1])) == len(expected[-1]) and len({a["answer"] for a in answers(tmp_path / "one")}) > 2
    for name in strategies:
        for seen, row in zip(measured(tmp_path / name), expected, strict=True):
            assert seen[:3] == row[:3] and seen[5:] == row[5:]
            assert [float(v or 0) for v in seen[3:5]] == pytest.approx([float(v or 0) for v in row[3:5]], rel=1e-5)
        assert [line["answer"] for line in answers(tmp_path / name)] == [a["answer"] for a in answers(tmp_path / "one")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fails_later", "ValueError: too many rows (my_metrics.py line 15)"),
        ("sleeps_later", "took longer than 5 s (--eval.metric_timeout)"),
        ("is_killed_later", "its process was killed by SIGKILL"),
    ],
)
def test_a_function_that_fails_ends_two_ranks(flags, name, reason):
    more = [
        "--eval.metric",
        f"my_metrics:{name}",
        "--eval.metric_timeout",
        "5",
        "--strategy",
        "ddp",
        "--devices",
        "2",
        "--out_dir",
        "fails",
    ]
    process = processes.Forked(["finetune_full", *flags, *more])
    _, err = processes.finish(process, 120)
    assert process.returncode == (1 if name == "is_killed_later" else 2), err
    last, saved, end = err.strip().splitlines()[-1].partition("; fails/step-")
    assert last == f"toolkit finetune_full: --eval.metric my_metrics:{name}: {reason}"
    assert end.endswith(" is saved; resume with --resume auto")
    assert Path(f"fails/step-{end.split()[0]}/COMPLETE").exists()  # no step is lost


@pytest.mark.slow
def test_s6_tensor_parallel_ranks_answer_together(flags, tmp_path):
    assert main(["finetune_full", *flags, *METRIC, "--out_dir", "one"]) == 0
    tensor = Case("tensor", [*METRIC, "--tensor_parallel_size", "2"], command="finetune_full")
    run_group(tmp_path, 2, [tensor], flags)
    assert [line["answer"] for line in answers(tmp_path / "tensor")] == [a["answer"] for a in answers(tmp_path / "one")]


def test_columns_of_tasks():
    """As run_tasks returns them, with a filter of answers."""
    results = {
        "arc_easy": {"acc": 0.5, "acc_stderr": 0.1, "num_fewshot": 0, "samples": 3},
        "gsm8k": {"exact_match,strict-match": 1, "exact_match_stderr,strict-match": 0.0, "samples": 3},
    }
    assert columns_of(results) == {
        "val_arc_easy_acc": 0.5, "val_arc_easy_acc_stderr": 0.1,
        "val_gsm8k_exact_match_strict-match": 1.0, "val_gsm8k_exact_match_strict-match_stderr": 0.0,
    }  # fmt: skip


@pytest.mark.slow
def test_tasks_of_lm_eval_are_metrics_and_agree_with_ours(tmp_path, monkeypatch, capsys, refusal):
    """On the same chat prompts: acc is choice, exact_match is ours, with the same standard errors."""
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    talker, folder = make_talker(tmp_path / "talker", block_size=128), write_tasks(tmp_path)
    questions = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    for name, mark in (("say", ""), ("choose", "?")):
        rows = [
            {"prompt": q["n"] + mark, "completion": q["choices"][q["label"]], "choices": q["choices"]}
            for q in questions
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        str(talker), "--accelerator", "cpu", "--data", "JSON", "--data.json_path", "say.jsonl",
        "--train.max_steps", "1", "--train.global_batch_size", "4", "--eval.max_new_tokens", "0",
        "--data.val_split_fraction", "0", "--train.learning_rate", "1e-4", "--eval.interval", "1",
        "--train.keep_best", "true",
        "--eval.metric_rows", "null", "--eval.tasks", "say,choose", "--eval.tasks_path", str(folder),
    ]  # fmt: skip
    runs = {
        "say": ["exact_match", "--eval.metric_new_tokens", "12", "--eval.best_by", "say_exact_match"],
        "choose": ["choice", "--eval.best_by", "choose_acc"],
    }
    for name, metric in runs.items():
        more = ["--eval.metric_data", f"{name}.jsonl", "--out_dir", name, "--eval.metric", *metric]
        assert main(["finetune_lora" if name == "say" else "finetune_full", *flags, *more]) == 0
        assert "--eval.tasks took " in capsys.readouterr().out
    for name, ours, theirs in (("say", "exact_match", "say_exact_match"), ("choose", "choice", "choose_acc")):
        names = [f"val_{each}{end}" for end in ("", "_stderr") for each in (ours, theirs)]
        for mine, other, *errors in columns(tmp_path / name, *names):
            assert float(mine) == pytest.approx(float(other)) and 0 < float(mine) < 1
            assert float(errors[0]) == pytest.approx(float(errors[1]))
        assert (tmp_path / name / "best" / "COMPLETE").is_file()
    for more, message in (
        (["--eval.best_by", "say_f1"], "--eval.best_by val_say_f1: no metric"),
        (
            ["--eval.best_by", "say_f1", "--eval.tasks", "sa"],
            "--eval.tasks sa: toolkit evaluate: --tasks sa: no such task; did you mean 'say'",
        ),
    ):
        assert message in refusal("finetune_full", *flags, *more, "--out_dir", "bad")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    assert "--eval.tasks say,choose: needs lm_eval; run: pip install 'lm_eval>=0.4.9.2'" in refusal(
        "finetune_full", *flags, "--out_dir", "bad"
    )
