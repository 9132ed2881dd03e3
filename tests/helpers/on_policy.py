"""Small runs with an on-policy objective, from the command line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from toolkit_on_policy.objective import OnPolicy
from toolkit_on_policy.rollouts import Rollout, path_of

from helpers.small_runs import write_base
from toolkit.cli import main
from toolkit.distributed import ranks
from toolkit.objectives.base import LOSS, scales, total_counts
from toolkit.training.step import _accumulate

REWARDS = """
import os
import time

calls = 0

def length(answers, references, rows):
    return {"letters": [float(len(answer) % 7) for answer in answers]}

def equal(answers, references, rows):
    return {"letters": [1.0 for _ in answers]}

def nan(answers, references, rows):
    return {"letters": [float("nan") for _ in answers]}

def short(answers, references, rows):
    return {"letters": [1.0]}

def raises(answers, references, rows):
    raise KeyError("no such field")

def hangs(answers, references, rows):
    time.sleep(60)

def one(answers, references, rows):
    return {"letters": 1.0}

def other(answers, references, rows):
    global calls
    calls += 1
    return {f"x{calls}": [1.0 for _ in answers]}

def exits(answers, references, rows):
    os._exit(7)

def ids(answers, references, rows):
    return {"place": [float(i) for i in range(len(answers))]}
"""
RUN = (
    "base --data Prompts --data.json_path prompts.jsonl --data.val_split_fraction 0.25 --accelerator cpu --devices 1 "
    "--train.global_batch_size 4 --train.micro_batch_size 2 --train.max_steps 3 --train.lr_warmup_steps 0 "
    "--train.learning_rate 1e-2 --train.max_seq_length 64 --eval.max_new_tokens 0 --objective.max_new_tokens 8"
)
GRPO_RUN = (
    f"{RUN} --objective GRPO --objective.answers 4 --objective.rewards_by scores:length "
    "--objective.mask_truncated false"  # the random model does not end
)

SAVING = f"{GRPO_RUN} --eval.interval 0 --eval.final_validation false --train.save_interval 2"


@pytest.fixture
def folder(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "base").mkdir()
    write_base(tmp_path / "base", corpus)
    (tmp_path / "scores.py").write_text(REWARDS)
    rows = [{"prompt": f"token {i} of the line", "completion": f"reads {i}", "level": i} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(words: str, out: str, command: str = "finetune_full") -> int:
    return main([command, *words.split(), "--out_dir", out])


def rollouts_of(out: str, step: int) -> list[dict]:
    return [json.loads(line) for line in path_of(Path(out), step).read_text().splitlines()[1:]]


def answers_of(out: str) -> dict[str, bytes]:
    """Return the files of answers of a run."""
    return {path.name: path.read_bytes() for path in sorted(path_of(Path(out), 0).parent.iterdir())}


def gradients_of_step(objective: OnPolicy, fabric, model, prompts: list[list[int]], rollouts: list[Rollout], size: int):
    """Return loss, gradients by name and the number of tokens of a step that trains on stored answers. Collective.

    Args:
        model: As Fabric wraps it.
        prompts: Token ids of each prompt; ranks take turns.
        rollouts: ``objective.answers`` of each prompt.
        size: Answers per micro-batch.
    """
    rows = SimpleNamespace(prompts=[SimpleNamespace(ids=ids) for ids in prompts])
    config = SimpleNamespace(max_seq_length=64, batch=SimpleNamespace(micro_batch_size=size))
    objective._launch = SimpleNamespace(data=SimpleNamespace(train=rows), config=config, fabric=fabric)
    objective._rollouts = lambda *_: rollouts
    objective.differences = []
    ids = list(range(fabric.global_rank, len(prompts), fabric.world_size))
    batches = objective.begin_step(model.train(), [SimpleNamespace(ids=ids, sample_keys=ids)])
    counts = ranks.all_reduce_sum(**total_counts(objective, batches))
    factors = scales(objective.parts(model), counts, fabric.world_size)
    model.zero_grad()
    sums = _accumulate(objective, SimpleNamespace(model=model, fabric=fabric), batches, factors, lambda: None)
    loss = ranks.sum_over_ranks(sums[LOSS].clone()) / counts["tokens"]
    return float(loss), {name: p.grad.clone() for name, p in model.module.named_parameters()}, counts["tokens"]
