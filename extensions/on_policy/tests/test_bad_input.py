"""Mistakes, rewards that fail, answers that are empty, end tokens that are also padding, signals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.compare_runs import curve, require_same
from helpers.on_policy import GRPO_RUN, RUN, SAVING, rollouts_of, run
from toolkit_on_policy.grpo import GRPO

from toolkit.models.labels import IGNORE_INDEX

SCORED = "--objective GRPO --objective.rewards_by scores:"
SHARE = "--objective OnPolicyDistillation --objective.teacher_dir base --objective.data_share 0.5"
REFUSED = {
    "--objective GRPO": "--objective.rewards_by: must be given, such as MODULE:FUNCTION",
    "--objective GRPO --objective.rewards_by nothing": "--objective.rewards_by nothing: no such metric",
    "--objective GRPO --objective.rewards_by choice": "--objective.rewards_by choice: compares choices",
    "--objective GRPO --objective.rewards_by reward:gone": "--objective.rewards_by reward:gone: checkpoint_dir gone",
    "--objective GRPO --objective.rewards_by exact_match --data.json_path open.jsonl": "line 2: has no answer to",
    f"{SCORED}length,scores:equal": "--objective.rewards_by scores:equal: letters is also another number; rename it",
    f"{SCORED}missing": "--objective.rewards_by scores:missing: ",
    f"{SCORED}raises": "--objective.rewards_by scores:raises: KeyError: 'no such field' (scores.py line 20)",
    f"{SCORED}nan": "--objective.rewards_by scores:nan: letters is nan; return finite numbers",
    f"{SCORED}short": "--objective.rewards_by scores:short: ",
    f"{SCORED}one": "--objective.rewards_by scores:one: letters is one number; return a list with one for each answer",
    f"{SCORED}other": "--objective.rewards_by: x1 is not always returned; always return the same names",
    f"{SCORED}exits": "--objective.rewards_by scores:exits: its process ended (exit code 7)",
    f"{SCORED}hangs --objective.rewards_by_timeout 1": "took longer than 1 s (--objective.rewards_by_timeout)",
    f"{SCORED}length --objective.answers 1": "--objective.answers 1: must be 2 or more",
    f"{SCORED}length --objective.max_new_tokens 60": "prompts.jsonl line 1: with its answer it has up to",
    f"{SCORED}length --objective.gather_weights false": "--objective.gather_weights false: has no effect with single",
    f"{SCORED}length --pipeline_parallel_size 2": "--pipeline_parallel_size 2: ",
    f"{SCORED}length --train.neftune_alpha 5": "--train.neftune_alpha 5.0 is not supported with --objective GRPO",
    f"{SCORED}length --optimizer.in_backward true --train.max_norm 0": "--optimizer.in_backward true is not supported",
    f"{SCORED}length --objective.rewards_by_timeout 0": "--objective.rewards_by_timeout 0.0: must be greater than zero",
    f"{SCORED}length --data JSON --data.prompt_style plain": "--data JSON: is not supported with --objective GRPO; ",
    f"{SCORED}length --data.json_path text.jsonl": "text.jsonl line 1: is plain text without a prompt",
    f"{SCORED}length --data.columns.prompt question": "prompts.jsonl line 1: has no column question (--data.columns)",
    f"{SCORED}length --train.global_batch_size 16": "--train.global_batch_size 16: the training data has only 12 rows",
    f"{SHARE} --data.json_path open.jsonl": "--objective.data_share 0.5: open.jsonl line 2: has no answer",
    f"{SHARE} --objective.max_new_tokens 1 --train.max_seq_length 12": "with its answer it has up to",
}
FAULTY = """
import os, signal, time

calls = 0

def values(answers):
    return {"letters": [len(answer) % 7 for answer in answers]}

def hangs(answers, references, rows):
    global calls
    calls += 1
    if calls == 4 and os.path.exists("fault"):  # one call is the trial: in step 3
        time.sleep(60)
    return values(answers)

def signals(answers, references, rows):
    global calls
    calls += 1
    if calls == 4 and os.path.exists("fault"):
        os.kill(os.getppid(), signal.SIGTERM)
    return values(answers)
"""


@pytest.mark.parametrize("options", REFUSED)
def test_mistakes_are_one_line(folder, options, capsys):
    (folder / "text.jsonl").write_text('{"text": "plain"}\n')
    (folder / "open.jsonl").write_text('{"prompt": "a ", "completion": "b"}\n{"prompt": "c "}\n' * 8)
    assert run(f"{RUN} --eval.interval 0 {options}", "out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert REFUSED[options] in error, error


@pytest.mark.parametrize("objective", ["NextToken", "DPO"])
def test_prompts_without_such_an_objective_are_refused(folder, objective, capsys):
    words = RUN.replace("--objective.max_new_tokens 8", f"--objective {objective}")
    assert run(words, "out") == 2
    error = capsys.readouterr().err
    assert f"--data Prompts: is not supported with --objective {objective}; GRPO and OnPolicyDistillation need" in error


@pytest.mark.parametrize(("fault", "code"), [("hangs", 2), ("signals", 143)])
def test_a_rollout_that_is_cut_short_trains_nothing_and_saves(folder, fault, code, capsys):
    """A resumed run may change the time limit, and continues as if nothing had happened."""
    Path("faulty.py").write_text(FAULTY)
    words = SAVING.replace("scores:length", f"faulty:{fault}").replace("save_interval 2", "save_interval 9")
    assert run(words, "whole") == 0
    Path("fault").touch()
    assert run(f"{words} --objective.rewards_by_timeout 1", "out") == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith("out/step-00000002 is saved; resume with --resume auto")
    assert len(curve("out")) == 2 and not Path("out/final").exists()
    Path("fault").unlink()
    assert run(f"{words} --objective.rewards_by_timeout 2 --resume auto", "out") == 0
    require_same(Path("whole"), Path("out"))


def test_empty_answers_and_an_end_that_is_also_padding_are_trained_on(folder, monkeypatch):
    """Many tokens end an answer, the padding token among them."""
    Path("base/generation_config.json").write_text(json.dumps({"eos_token_id": list(range(250))}))
    settings = json.loads(Path("base/tokenizer_config.json").read_text())
    Path("base/tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": settings["eos_token"]}))
    trained, sums = [], GRPO.sums

    def recorded(self, model, batch, device):
        if model.training:
            trained.extend(batch.labels[batch.labels != IGNORE_INDEX].tolist())
        return sums(self, model, batch, device)

    monkeypatch.setattr(GRPO, "sums", recorded)
    words = GRPO_RUN.replace("mask_truncated false", "mask_truncated true").replace("scores:length", "scores:ids")
    assert run(f"{words} --eval.interval 0 --train.max_steps 1 --train.micro_batch_size 4", "out") == 0
    answers = rollouts_of("out", 0)
    assert all(a["has_ended"] == (a["tokens"][-1] < 250) for a in answers)
    assert any(len(a["tokens"]) == 1 and a["text"] == "" for a in answers)
    kept = [a["tokens"] for a in answers if a["has_ended"]]
    assert sorted(trained) == sorted(token for tokens in kept for token in tokens)
    row = curve("out")[-1]
    assert row["logprob_difference_largest"] < 1e-5 and row["dropped"] == pytest.approx(1 - len(kept) / 16)


@pytest.mark.slow
def test_ranks_wait_for_a_slow_reward_longer_than_for_each_other(folder):
    Path("faulty.py").write_text(FAULTY.replace("time.sleep(60)", "time.sleep(15)"))
    Path("fault").touch()
    words = f"{GRPO_RUN} --eval.interval 0 --timeout 0.15 --devices 2".replace("scores:length", "faulty:hangs").split()
    command = [sys.executable, "-m", "toolkit", "finetune_full", *words, "--out_dir", "out"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "waiting for rank 0 to score answers" in ended.stdout


@pytest.mark.slow
def test_a_reward_model_scores_on_two_ranks(folder, capsys):
    rows = [{"prompt": f"token {i} ", "chosen": "reads", "rejected": "writes"} for i in range(8)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = (
        "base --objective Reward --head reward --data Preference --data.json_path pairs.jsonl --accelerator cpu "
        "--data.prompt_style plain --train.max_steps 1 --train.global_batch_size 4 --eval.max_new_tokens 0 --devices 1"
    )
    assert run(trained, "reward") == 0
    words = GRPO_RUN.replace("scores:length", "scores:length,reward:reward/final") + " --eval.interval 3"
    assert run(words, "one") == 0
    two = words.replace("--devices 1", "--devices 2").split()
    subprocess.run([sys.executable, "-m", "toolkit", "finetune_full", *two, "--out_dir", "two"], check=True)
    for a, b in zip(curve("one"), curve("two"), strict=True):
        for name in ("reward", "reward_reward", "reward_letters", "loss"):
            assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-6), name
