"""Log speed, samples with rewards, and how far the decoder's probabilities are from the trainer's."""

from __future__ import annotations

from statistics import median
from typing import Any

from toolkit.distributed import ranks
from toolkit.training.callbacks.samples import report_sample
from toolkit.training.run import Callback, Metrics, Run

IDLE_STEPS = 50
"""Steps in a row that trained on no answer, after which to warn: rare rewards may still come."""


class RolloutMetrics(Callback):
    """Logs tokens per second of rollouts and of updates, in GRPO the differences of log-probabilities, in nats, and
    after a validation some of its answers.
    """

    columns = (
        "rollout_tokens_per_sec",
        "update_tokens_per_sec",
        "logprob_difference_median",
        "logprob_difference_largest",
    )

    def __init__(self) -> None:
        self._n_steps = self._n_idle = 0

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        self._n_steps += 1
        self._n_idle = self._n_idle + 1 if metrics.get("dropped") == 1 else 0
        is_last = trainer.progress.step == trainer.display.total_steps
        if self._n_idle == IDLE_STEPS or (is_last and self._n_idle == self._n_steps < IDLE_STEPS):
            trainer.display.message(
                f"warning: the last {self._n_idle} steps trained on no answer: the answers to each prompt had equal "
                f"rewards, or were cut off ({metrics['truncated']:.0%} in this step); use other rewards or prompts, or "
                "raise --objective.answers or --objective.max_new_tokens"
            )

    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        objective: Any = trainer.objective
        if objective.sampling_seconds:  # not read from files
            metrics["rollout_tokens_per_sec"] = objective.sampled_tokens / objective.sampling_seconds
        objective.sampled_tokens = objective.sampling_seconds = 0
        if "update_s" in metrics:
            metrics["update_tokens_per_sec"] = metrics["tokens_per_sec"] * metrics["step_s"] / metrics["update_s"]
        values = [value for part in objective.differences for value in part.tolist()]
        objective.differences = []
        if values := [value for part in ranks.all_gather_object(values) for value in part]:
            metrics["logprob_difference_median"], metrics["logprob_difference_largest"] = median(values), max(values)

    def on_validation_end(self, trainer: Run, metrics: Metrics) -> None:
        objective: Any = trainer.objective
        data: Any = trainer.data
        for answer in objective.samples if trainer.args.eval.max_new_tokens else ():
            prompt = data.tokenizer.decode(data.val.prompts[answer.prompt].ids)
            rewards = [f", {name} {value:.4g}" for name, value in answer.rewards.items()]
            report_sample(trainer, prompt, answer.text, "".join(rewards))
