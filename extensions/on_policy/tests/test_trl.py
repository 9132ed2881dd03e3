"""Losses and gradients on stored answers against those of TRL 1.16, which trl/write.py has written."""

import json
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from helpers.on_policy import gradients_of_step
from toolkit_on_policy.distillation import OnPolicyDistillation
from toolkit_on_policy.grpo import GRPO
from toolkit_on_policy.rollouts import Rollout

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights

TRL = Path(__file__).parent / "trl"
STORED = json.loads((TRL / "answers.json").read_text())
ANSWERS, TEMPERATURE = 4, STORED["temperature"]


class AsTRL(GRPO):
    """Divides by TRL's deviation: 1e-4 more."""

    def advantages(self, rollouts, n):
        rewards = [rollout.rewards["r"] for rollout in rollouts]
        values = super().advantages(rollouts, n)
        for i, value in enumerate(values):
            group = rewards[i - i % n :][:n]
            if value is not None:
                values[i] = value * statistics.stdev(group) / (statistics.stdev(group) + 1e-4)
        return values


def read_answers(n_prompts: int, answers: int) -> tuple[list[list[int]], list[Rollout]]:
    rows = STORED["answers"][: n_prompts * ANSWERS]
    prompts = [row["prompt"] for row in rows[::answers]]
    rollouts = [
        Rollout(i // answers, i // answers, i % answers, row["tokens"], [0.0] * len(row["tokens"]),
                row["tokens"][-1] == STORED["eos"], "", {"r": row["reward"]})
        for i, row in enumerate(rows)
    ]  # fmt: skip
    return prompts, rollouts


def require_equal(case, tmp_path, fabric, objective, prompts, rollouts) -> None:
    """Compare loss and gradients in two splits, scaled by the tokens that are counted."""
    expected = STORED["results"][case]
    (tmp_path / "gradients").mkdir()
    shutil.copy(TRL / "student" / "config.json", tmp_path / "gradients")
    shutil.copy(TRL / f"{case}.safetensors", tmp_path / "gradients" / "model.safetensors")
    for source, name in ((TRL / "student", "student"), (tmp_path / "gradients", "converted")):
        import_hf(source, tmp_path / name)
    theirs = load_weights(tmp_path / "converted")
    for size in (ANSWERS, 1):
        model = fabric.setup(load_model(tmp_path / "student", dtype=torch.float32))
        loss, gradients, n_tokens = gradients_of_step(objective, fabric, model, prompts, rollouts, size)
        factor = expected["tokens"] / n_tokens  # more than 1 if TRL counts tokens without advantage
        assert (factor == 1) == (case != "equal_rewards")
        if isinstance(objective, OnPolicyDistillation):
            factor *= TEMPERATURE**2  # as --objective Distillation, for gradients of one size at any temperature
        assert loss == pytest.approx(expected["loss"] * factor, rel=1e-5)
        assert len(gradients) == len(theirs) - 1  # theirs has both names of the tied weight
        for name, gradient in gradients.items():
            assert (gradient - theirs[name] * factor).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(("case", "n_prompts"), [("grpo", 2), ("divided", 2), ("equal_rewards", 3)])
def test_grpo_is_that_of_trl(case, n_prompts, tmp_path, fabric):
    """TRL's loss_type dapo, without KL, and with cut-off answers masked."""
    objective = AsTRL if case == "divided" else GRPO
    objective = objective(ANSWERS, temperature=TEMPERATURE, rewards_by="r", divide_by_std=case == "divided")
    require_equal(case, tmp_path, fabric, objective, *read_answers(n_prompts, ANSWERS))


@pytest.mark.parametrize(("case", "beta"), [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.3)])
def test_distillation_is_that_of_trl(case, beta, tmp_path, fabric):
    import_hf(TRL / "teacher", tmp_path / "teacher")
    objective = OnPolicyDistillation(divergence=case, beta=beta, temperature=TEMPERATURE, teacher_dir="teacher")
    objective.frozen = fabric.setup(load_model(tmp_path / "teacher", dtype=torch.float32))
    require_equal(case, tmp_path, fabric, objective, *read_answers(3, 1))
