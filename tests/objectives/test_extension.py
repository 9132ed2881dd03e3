"""An objective of an extension: pairs of rows, its own normalizer, a part that is only logged."""

import importlib
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import toolkit
from toolkit import extension
from toolkit.cli import main
from toolkit.training.checkpoint_meta import read_meta
from toolkit.ui.loggers import read_metrics

EXTENSION = """
from toolkit.extension import Extension

EXTENSION = Extension(data={"Pairs": "pairs_parts.Pairs"}, objectives={"Margin": "pairs_parts.Margin"})
"""
PARTS = '''
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from toolkit.data.base import DataModule, PreparedData
from toolkit.objectives import Objective, Part
from toolkit.objectives.inputs import forward_inputs


class Rows:
    group_size = 2

    def __init__(self, n):
        generator = np.random.default_rng(n)
        self.tokens = generator.integers(1, 60, (n, 2, 17))
        self.lengths = np.full(n, 32)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        rows = torch.from_numpy(self.tokens[i])
        labels = [row[1:].clone() for row in rows]
        for label, masked in zip(labels, (3 + i % 5, 4)):
            label[:masked] = -100
        return [{"input_ids": row[:-1], "labels": label} for row, label in zip(rows, labels)]


@dataclass
class Pairs(DataModule):
    """Random pairs."""

    def prepare(self, *, tokenizer, max_seq_length, report=print):
        return PreparedData(Rows(40), Rows(9), None, "pairs", "random pairs", vocab_size=64)


@dataclass
class Margin(Objective):
    """The first row of a pair more likely than the second.

    Args:
        beta: Of the difference.
    """

    beta: float = 0.1
    normalizers = ("tokens", "pairs")

    def parts(self, module):
        return (Part("loss", "pairs"), Part("accuracy", "pairs", weight=0), Part("log_prob", weight=0))

    def count(self, batch):
        return {"pairs": sum(row >= 0 for row in batch.ids[::2])}

    def sums(self, model, batch, device):
        log_probs, _ = model(**forward_inputs(model, batch, device), log_probs=True)
        sums = log_probs.sum(1)
        is_pair = torch.tensor(batch.ids[::2], device=device) >= 0
        difference = torch.where(is_pair, sums[::2] - sums[1::2], 0)
        loss = torch.where(is_pair, -logsigmoid(self.beta * difference), 0)
        return {"loss": loss.sum(), "accuracy": (difference > 0).sum().float(), "log_prob": log_probs.sum().detach()}
'''
RUN = (
    "--data Pairs --objective Margin --objective.beta 0.3 --train.global_batch_size 8 --train.max_steps 4 "
    "--train.lr_warmup_steps 0 --train.max_seq_length 16 --train.learning_rate 0.01 --eval.interval 2 --accelerator cpu"
)
COLUMNS = {"loss", "accuracy", "log_prob", "val_loss", "val_accuracy", "grad_norm", "learning_rate"}


@pytest.fixture(autouse=True)
def pairs(tmp_path, monkeypatch):
    for name, text in (("pairs", EXTENSION), ("pairs_parts", PARTS)):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(extension, "_module_extensions", {})


def curve(out: str) -> list[dict[str, float]]:
    rows = read_metrics(Path(out) / "logs" / "metrics.csv")
    return [{name: value for name, value in row.items() if name in COLUMNS} for row in rows]


def run(out: str, words: str) -> list[dict[str, float]]:
    command = ["pretrain", "pico-llama", "--extensions", "pairs", *RUN.split(), *words.split(), "--out_dir", out]
    assert main(command) == 0
    return curve(out)


def test_n2_pairs_are_one_curve_in_every_split_and_resumed(capsys):
    whole = run("whole", "--train.micro_batch_size 8")
    printed = capsys.readouterr().out
    assert re.search(r"step 4/4 \| loss .* accuracy [\d.]+", printed)
    assert re.search(r"step 4/4 \| validation loss [\d.]+, accuracy [\d.]+, log prob -[\d.]+\n", printed)
    assert whole[0]["loss"] == pytest.approx(0.69, abs=0.3) and whole[1].keys() >= COLUMNS
    assert math.isnan(read_metrics(Path("whole/logs/metrics.csv"))[1]["val_ppl"])  # no likelihood
    run("split", "--train.micro_batch_size 1 --train.save_interval 2")
    shutil.rmtree("split/final")
    rows = run("split", "--train.micro_batch_size 4 --resume split/step-00000002")
    assert len(rows) == len(whole)
    for row, expected in zip(rows, whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, nan_ok=True)
    options = yaml.safe_load(Path("split/final/hyperparameters.yaml").read_text())
    assert options["objective"] == {"class_path": "Margin", "init_args": {"beta": 0.3}}


@pytest.mark.slow
def test_n2_pairs_on_two_ranks():
    whole = run("whole", "--train.micro_batch_size 8")
    words = [*RUN.split(), "--devices", "2", "--strategy", "fsdp", "--extensions", "pairs", "--out_dir", "two"]
    subprocess.run([sys.executable, "-m", "toolkit", "pretrain", "pico-llama", *words], check=True)
    for row, expected in zip(curve("two"), whole, strict=True):
        assert row == pytest.approx(expected, rel=1e-4, nan_ok=True)


def test_mistakes_are_one_line(refusal):
    cases = {
        "--objective Margn": "did you mean 'Margin'",
        "--objective Margin --objective.bet 1": "did you mean --objective.beta",
    }
    for words, message in cases.items():
        assert message in refusal("pretrain", "pico-llama", "--extensions", "pairs", "--data", "Pairs", *words.split())


def test_an_objective_needs_no_extension(capsys):
    words = RUN.replace("Pairs", "pairs_parts.Pairs").replace("Margin", "pairs_parts.Margin").split()
    assert main(["pretrain", "pico-llama", *words, "--out_dir", "class_path"]) == 0
    parts = importlib.import_module("pairs_parts")
    toolkit.train(
        "pico-llama", parts.Pairs(), objective=parts.Margin(beta=0.3), out_dir="python", accelerator="cpu",
        train={"global_batch_size": 8, "max_steps": 4, "lr_warmup_steps": 0, "max_seq_length": 16,
               "learning_rate": 0.01},
        eval={"interval": 2},
    )  # fmt: skip
    assert "accuracy" in curve("python")[0] and repr(curve("python")) == repr(curve("class_path"))
    capsys.readouterr()
    assert main(["pretrain", *words[:4], "--help", "objective"]) == 0 and "--objective.beta" in capsys.readouterr().out


STATEFUL = """
from dataclasses import dataclass, field

from pairs_parts import Margin as Base
from torch import nn


class Plain(Base.__base__):
    sums = Base.sums


@dataclass
class Margin(Base):
    name: str = "mine"
    n_calls: int = field(default=0, init=False)

    def __post_init__(self):
        self.layer = nn.Linear(1, 1)
"""


def test_only_fields_are_options_of_an_objective(refusal):
    Path("stateful.py").write_text(STATEFUL)
    sys.modules.pop("stateful", None)
    words = RUN.partition(" --objective.beta")[0] + " --train.max_steps 2 --train.global_batch_size 4"
    words += " --train.lr_warmup_steps 0 --train.max_seq_length 16 --accelerator cpu --out_dir out --extensions pairs"
    run = ["pretrain", "pico-llama", *words.split(), "--objective"]
    assert main([*run, "stateful.Margin", "--objective.name", "first"]) == 0
    entry = {"class_path": "stateful.Margin", "init_args": {"beta": 0.1, "name": "first"}}
    assert yaml.safe_load(Path("out/final/hyperparameters.yaml").read_text())["objective"] == entry
    assert read_meta(Path("out/final"))["identity"]["objective"] == entry
    more = ["--resume", "auto", "--train.max_steps", "3"]
    for objective, message in {
        "stateful.Margin": "--objective.name mine: out/final was trained with --objective.name first",
        "Margin": "--objective Margin: out/final was trained with --objective stateful.Margin",
        "stateful.Plain": "--objective Plain: must be a dataclass",
    }.items():
        assert message in refusal(*run, objective, *more)
    assert main([*run, "stateful.Margin", "--objective.name", "first", *more]) == 0


COUNTED = """
from dataclasses import dataclass

from pairs_parts import Margin
from toolkit.objectives import Part


@dataclass
class Inputs(Margin):
    normalizers = ("tokens", "pairs", "inputs")

    def count(self, batch):
        return super().count(batch) | {"inputs": 1}


@dataclass
class Uncounted(Inputs):
    def count(self, batch):
        return {"pairs": 1}


@dataclass
class Undeclared(Margin):
    normalizers = ("tokens",)
"""


def test_normalizers_have_any_name_and_are_checked_before_the_first_step(capsys):
    Path("counted.py").write_text(COUNTED)
    sys.modules.pop("counted", None)
    words = RUN.replace("Margin", "counted.Inputs") + " --extensions pairs --out_dir "
    assert main(["pretrain", "pico-llama", *words.split(), "out"]) == 0
    for name, message in {
        "Uncounted": "objective Uncounted: count() must return 'inputs'",
        "Undeclared": "objective Undeclared: part loss: unknown normalizer 'pairs'; `normalizers` has tokens",
    }.items():
        for initial in ("true", "false"):
            again = words.replace("Inputs", name) + f"{name}-{initial} --eval.initial_validation {initial}"
            assert main(["pretrain", "pico-llama", *again.split()]) == 2
            err = capsys.readouterr().err
            assert message in err and "Traceback" not in err and not list(Path(f"{name}-{initial}").glob("step-*"))
