"""On-policy objectives: what is generated, stored, scored and trained on, in runs from the command line."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.compare_runs import curve
from helpers.on_policy import GRPO_RUN, RUN, rollouts_of, run
from helpers.small_runs import write_base
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.rollouts import Rollout, path_of, read_rollouts, write_rollouts

from toolkit.checkpoints.weights import load_weights
from toolkit.inference import decode


def test_advantages_are_relative_to_the_prompt():
    def rollout(reward, has_ended=True):
        return Rollout(0, 0, 0, [1], [0.0], has_ended, "", {"a": reward})

    group = [rollout(value) for value in (1.0, 0.0, 0.0, 3.0)]
    equal = [rollout(2.0) for _ in range(4)]
    objective = GRPO(answers=4, rewards_by="length")
    assert objective.advantages([*group, *equal], 4) == [0.0, -1.0, -1.0, 2.0, *[None] * 4]
    cut = [*group[:3], rollout(3.0, has_ended=False)]
    assert objective.advantages(cut, 4) == [0.0, -1.0, -1.0, None]  # which counts in the mean
    scaled = GRPO(answers=4, rewards_by="length", divide_by_std=True).advantages(group, 4)
    assert scaled == pytest.approx([value / math.sqrt(2) for value in (0.0, -1.0, -1.0, 2.0)])


@pytest.mark.parametrize("command", ["finetune_full", "finetune_lora"])
def test_a_run_trains_on_its_answers_and_the_decoder_computes_as_the_trainer(folder, command):
    assert run(f"{GRPO_RUN} --eval.interval 3", "out", command) == 0
    rows = curve("out")
    assert all(0 <= row["logprob_difference_median"] <= row["logprob_difference_largest"] < 1e-5 for row in rows)
    assert rows[-1]["val_reward"] >= 0 and math.isnan(rows[-1]["val_loss"])
    answers = rollouts_of("out", 2)
    assert len(answers) == 16 and len({(a["prompt"], a["number"]) for a in answers}) == 16
    assert len({tuple(a["tokens"]) for a in answers}) > 8  # each has a seed
    assert all(a["rewards"] == {"letters": len(a["text"]) % 7} for a in answers)
    mean = sum(a["rewards"]["letters"] for a in answers) / 16
    assert rows[-1]["reward"] == pytest.approx(mean) and rows[-1]["truncated"] > 0


def test_a_prompt_that_a_step_has_twice_gets_other_answers(folder):
    lines = Path("prompts.jsonl").read_text().splitlines(keepends=True)
    Path("prompts.jsonl").write_text("".join(lines[:5]))
    assert run(f"{GRPO_RUN} --data.val_split_fraction 0", "out") == 0
    steps = [rollouts_of("out", step) for step in range(3)]
    assert any(len({a["prompt"] for a in answers}) < 4 for answers in steps)  # an epoch ends within the step
    for answers in steps:
        groups = [[a["tokens"] for a in answers if a["key"] == key] for key in {a["key"] for a in answers}]
        assert len(groups) == 4 and all(groups.count(group) == 1 for group in groups)


def test_the_temperature_divides_unrounded_logits(folder):
    words = f"{GRPO_RUN} --eval.interval 0 --precision bf16-true --objective.temperature 0.7"
    assert run(words, "out", "finetune_lora") == 0
    assert all(row["logprob_difference_median"] < 1e-4 for row in curve("out"))


@pytest.mark.parametrize("fault", ["temperature", "position", "end"])
def test_a_wrong_decoder_is_seen(folder, fault, monkeypatch):
    """What the trainer computes differs then from what the decoder says."""
    if fault == "temperature":
        append = decode.Decoder._append
        monkeypatch.setattr(decode.Decoder, "_append", lambda self, logits: append(self, logits / 1.1))
    elif fault == "position":
        forward = decode.Decoder._logits
        shifted = lambda self, ids: forward(self, torch.roll(ids, 1, 1) if ids.size(1) > 1 else ids)  # noqa: E731
        monkeypatch.setattr(decode.Decoder, "_logits", shifted)
    else:
        recorded = decode.Decoder.recorded
        rolled = lambda self: [(tokens, [*probs[1:], probs[0]]) for tokens, probs in recorded(self)]  # noqa: E731
        monkeypatch.setattr(decode.Decoder, "recorded", rolled)
    assert run(f"{GRPO_RUN} --eval.interval 0", "out") == 0
    assert min(row["logprob_difference_largest"] for row in curve("out")) > 1e-3


def test_files_are_checked(tmp_path):
    lines: list[str] = []

    def read(step=7, origin="key"):
        return read_rollouts(tmp_path, step, origin, lines.append)

    rollouts = [Rollout(1, 2, 3, [4, 5], [-0.1, -1e-9], True, "a", {"r": 0.5})]
    write_rollouts(tmp_path, 7, "key", rollouts)
    assert read() == rollouts and read(8) is None and not lines
    assert read(origin="other") is None
    path = path_of(tmp_path, 7)
    path.rename(copy := tmp_path / "copy")
    path.symlink_to(copy)
    assert read() is None  # links are not followed
    path.unlink()
    path.mkdir()
    assert read() is None
    path.rmdir()
    path.write_bytes(copy.read_bytes().replace(b"-0.1", b"-0.2"))
    assert read() is None
    assert len(lines) == 4 and all(f"{path}: is damaged, or of other options" in line for line in lines)


def test_equal_rewards_change_nothing_but_the_decay(folder, capsys):
    words = f"{GRPO_RUN} --eval.interval 0 --optimizer.weight_decay 0".replace("scores:length", "scores:equal")
    assert run(words, "out") == 0
    first, last = load_weights(Path("base")), load_weights(Path("out/final"))
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert all(row["dropped"] == 1 and row["loss"] == 0 for row in curve("out"))
    assert "warning: the last 3 steps trained on no answer" in capsys.readouterr().out


def test_experts_are_balanced(folder, corpus):
    (folder / "experts").mkdir()
    write_base(
        folder / "experts",
        corpus,
        n_expert=4,
        n_expert_per_token=2,
        moe_intermediate_size=32,
        mlp_class_name="LLaMAMoE",
        router_aux_loss_coef=0.1,
    )
    assert run(f"{GRPO_RUN.replace('base', 'experts', 1)} --eval.interval 3", "out") == 0
    assert all(row["balancing_loss"] > 0 and row["logprob_difference_largest"] < 1e-5 for row in curve("out"))


def test_distillation_on_answers_of_the_student(folder, corpus):
    (folder / "teacher").mkdir()
    write_base(folder / "teacher", corpus, n_layer=3)
    words = f"{RUN} --objective OnPolicyDistillation --objective.teacher_dir teacher --eval.interval 3"
    longer = words.replace("max_steps 3", "max_steps 12").replace("rate 1e-2", "rate 1e-3")
    assert run(f"{longer} --objective.divergence reverse_kl --eval.initial_validation true", "out") == 0
    losses = [row["val_loss"] for row in curve("out") if "val_loss" in row]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.9 * losses[0]
    assert run(f"{words} --objective.data_share 0.9", "mixed") == 0
    texts = [answer["text"] for step in range(3) for answer in rollouts_of("mixed", step)]
    assert 6 <= sum("reads" in text for text in texts) <= 12


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_one_curve_on_the_answers_of_one(folder, strategy):
    words = f"{GRPO_RUN} --eval.interval 3 --train.max_steps 6"
    assert run(words, "one") == 0
    (folder / "two").mkdir()
    subprocess.run(["cp", "-r", "one/rollouts", "two/rollouts"], check=True)
    two = words.replace("--devices 1", f"--devices 2 --strategy {strategy}").split()
    subprocess.run([sys.executable, "-m", "toolkit", "finetune_full", *two, "--out_dir", "two"], check=True)
    for a, b in zip(curve("one"), curve("two"), strict=True):
        for name in ("loss", "grad_norm", "reward", "val_reward"):
            limit = 1e-4 if name == "grad_norm" else 1e-5  # AdamW divides rounding of small gradients by their size
            assert a.get(name, 0) == pytest.approx(b.get(name, 0), rel=limit, abs=1e-6, nan_ok=True), (name, a, b)
