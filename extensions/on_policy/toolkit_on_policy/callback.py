"""Log how fast answers are generated, and how far the decoder's probabilities are from the trainer's."""

from __future__ import annotations

from typing import Any

import torch

from toolkit.distributed import ranks
from toolkit.training.run import Callback, Metrics, Run


class RolloutMetrics(Callback):
    """Logs tokens per second of the last step's rollouts, and in GRPO the differences of log-probabilities, in nats."""

    columns = ("rollout_tokens_per_sec", "difference_median", "difference_largest")

    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        objective: Any = trainer.objective
        if objective.rollout_speed:  # of this launch
            metrics["rollout_tokens_per_sec"] = objective.rollout_speed
        values = [value for part in ranks.all_gather_object(objective.take_differences()) for value in part]
        if values:
            tensor = torch.tensor(values)
            metrics["difference_median"], metrics["difference_largest"] = float(tensor.median()), float(tensor.max())
