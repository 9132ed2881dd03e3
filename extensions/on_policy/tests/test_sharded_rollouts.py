"""Rollouts under FSDP: the weights are gathered once, and each rank answers its own prompts."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.compare_runs import curve
from helpers.small_runs import write_base
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.rollouts import path_of

from toolkit.cli import main
from toolkit.models.families import get_config
from toolkit.training.checkpoint_meta import objective_fingerprint

RUN = (
    "base --data Prompts --data.json_path prompts.jsonl --data.val_split_fraction 0.25 --accelerator cpu "
    "--train.global_batch_size 4 --train.micro_batch_size 2 --train.max_steps 3 --train.lr_warmup_steps 0 "
    "--train.learning_rate 1e-2 --train.max_seq_length 64 --eval.max_new_tokens 0 --eval.interval 3 "
    "--objective GRPO --objective.answers 40 --objective.rewards_by scores:length --objective.max_new_tokens 8 "
    "--objective.mask_truncated false"
)
LOCKSTEP = "--objective.gather_weights false"


@pytest.fixture
def folder(tmp_path, corpus, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "base").mkdir()
    write_base(tmp_path / "base", corpus)
    reward = "return {'letters': [float(len(answer) % 7) for answer in answers]}"
    (tmp_path / "scores.py").write_text(f"def length(answers, references, rows):\n    {reward}\n")
    rows = [{"prompt": "token " * (1 + i % 5), "completion": f"reads {i}"} for i in range(16)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def rollouts_of(out: str, step: int) -> list[dict]:
    return [json.loads(line) for line in path_of(Path(out), step).read_text().splitlines()[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["finetune_full", "finetune_lora"])
def test_gathered_weights_give_the_answers_and_the_curve_of_lockstep_and_of_one_process(folder, command):
    assert main([command, *RUN.split(), "--devices", "1", "--out_dir", "one"]) == 0
    for name, more in (("gathered", ""), ("lockstep", LOCKSTEP)):
        words = f"{RUN} --devices 2 --strategy fsdp --out_dir {name} {more}".split()
        subprocess.run([sys.executable, "-m", "toolkit", command, *words], check=True)
    assert len(rollouts_of("one", 0)) == 160  # three batches, on two ranks
    for step in range(3):
        for a, b in zip(rollouts_of("gathered", step), rollouts_of("lockstep", step), strict=True):
            assert a["tokens"] == b["tokens"]
            assert a["log_probs"] == pytest.approx(b["log_probs"], abs=1e-6)
    for a, b in zip(rollouts_of("gathered", 0), rollouts_of("one", 0), strict=True):
        assert a["tokens"] == b["tokens"]
        assert a["log_probs"] == b["log_probs"]
    for a, b in zip(curve("gathered"), curve("lockstep"), strict=True):
        for name in ("loss", "grad_norm", "reward", "val_reward"):
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=1e-6, abs=1e-7, nan_ok=True), (name, a, b)
    assert all(row["difference_largest"] < 1e-5 for row in curve("gathered"))


def test_a_resumed_run_may_gather_otherwise():
    runs = [
        SimpleNamespace(objective=GRPO(rewards_by="f", gather_weights=gathers), reference_dir=None)
        for gathers in (True, False)
    ]
    first, second = map(objective_fingerprint, runs)
    assert first == second


def test_the_plan_counts_gathered_weights_and_kv_cache_or_the_step(folder, capsys):
    """Whichever is more: gradients and activations are not in memory while answers are generated."""

    def plan(*more: str) -> tuple[dict[str, float], list[str]]:
        words = RUN.replace("base", "Llama-3.2-1B").replace("cpu", "cuda").replace("length 64", "length 2048").split()
        words += ["--devices", "8", "--strategy", "fsdp", "--precision", "bf16-true", "--format", "json"]
        words += ["--train.global_batch_size", "8", "--train.micro_batch_size", "1", *more]
        assert main(["plan", "finetune_full", *words]) == 0
        planned = json.loads(capsys.readouterr().out)
        return planned["memory_gb"], [advice["change"] for advice in planned["advice"]]

    full = ["--train.activation_checkpointing", "full"]
    rollout, _ = plan(*full)
    config = get_config("Llama-3.2-1B")
    row_bytes = 2 * 2 * config.n_layer * config.n_query_groups * config.head_size * 2049
    assert rollout["kv_cache"] == pytest.approx((4 << 30) // row_bytes * row_bytes / 1e9, abs=1e-3)
    assert rollout["gathered_weights"] == pytest.approx(8 * rollout["weights"], abs=0.01)
    stay = ("weights", "optimizer", "context")
    others = sum(rollout[name] for name in stay)
    assert rollout["total"] == pytest.approx(others + rollout["gathered_weights"] + rollout["kv_cache"], abs=0.01)
    step, _ = plan()
    assert step["total"] > rollout["total"] and step["gathered_weights"] == rollout["gathered_weights"]
    lockstep, _ = plan(*full, *LOCKSTEP.split())
    assert lockstep["total"] < rollout["total"] - 1 and lockstep["gathered_weights"] == 0
    _, advice = plan(*full, "--device_memory_gb", "7")
    assert LOCKSTEP in advice, advice
