"""GRPO (arXiv 2402.03300, section 4.1), in its smallest exact form: one update per rollout, no KL term.

With r_i the reward of answer i of a prompt, the advantage A_i is r_i minus the mean over the prompt's answers
(arXiv 2503.20783, section 3: without the division by the standard deviation, which --objective.divide_by_std adds).
The loss is - sum A_i p(token) / p_old(token) over all tokens of the global batch, divided by their number. p_old is p
before the update, of the same forward pass: the ratio is 1, and only its gradient counts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.config.checks import require_positive
from toolkit.data.base import PreparedData
from toolkit.errors import UserError, require_option
from toolkit.models.labels import IGNORE_INDEX, TOKENS
from toolkit.objectives.base import LOSS, Part
from toolkit_on_policy.objective import ANSWERS, LOGGED, OnPolicy

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch
    from toolkit.training.launch import Launch
    from toolkit_on_policy.rollouts import Rollout

REWARD, DROPPED = "reward", "dropped"


@dataclass
class GRPO(OnPolicy):
    """Raise the rewards of the model's own answers, relative to its other answers to the same prompt.

    Validations have the mean reward of greedy answers to held-out prompts, and no loss.

    Args:
        answers: Answers to each prompt in a step.
        rewards_by: Functions as in --eval.metric, with a number for each answer; a sum if several.
        rewards_by_timeout: Seconds that a call of a function may take.
        divide_by_std: Divide advantages by the standard deviation of the prompt's rewards, of n - 1.
        mask_truncated: Do not train on answers that are cut off.
    """

    answers: int = 8
    rewards_by: str = ""
    rewards_by_timeout: float = field(default=60.0, compare=False)
    divide_by_std: bool = False
    mask_truncated: bool = True

    normalizers = (TOKENS, ANSWERS)
    best_by = REWARD
    higher_is_better = {REWARD: True}
    _names = list[str]()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("objective", self, "rewards_by_timeout")
        if not self.rewards_by:
            raise UserError("--objective.rewards_by: must be given, such as MODULE:FUNCTION")
        require_option(self.answers > 1, "objective.answers", self.answers, "must be 2 or more, to compare them")

    def prepare(self, launch: Launch) -> PreparedData:
        from toolkit_metric.scores import AnswerScores

        from toolkit.distributed import ranks

        model, length = launch.config.model, launch.config.max_seq_length or 0
        if model is not None and length > (original := model.original_max_position or length):
            hint = f"longrope scores tokens of longer rows with other factors than it samples with; use {original}"
            raise UserError(f"--train.max_seq_length {length}: {hint}")
        data: Any = super().prepare(launch)
        options = self.rewards_by, self.rewards_by_timeout, "--objective.rewards_by"
        report = launch.display.message
        reporter = ranks.WaitReporter("start --objective.rewards_by", report)
        self.scores = ranks.run_on_rank0(lambda: AnswerScores(*options, data.train.prompts, report), reporter)
        self._names = ranks.broadcast_from_rank0(self.scores and self.scores.names)
        return data

    def advantages(self, rollouts: list[Rollout], n: int) -> list[float | None]:
        values: list[float | None] = []
        for start in range(0, len(rollouts), n):
            group = rollouts[start : start + n]
            rewards = [sum(rollout.rewards.values()) for rollout in group]
            mean, std = statistics.fmean(rewards), statistics.stdev(rewards) if n > 1 else 0.0
            scale = std if self.divide_by_std else 1.0
            for rollout, reward in zip(group, rewards, strict=True):
                is_masked = std == 0 or (self.mask_truncated and not rollout.has_ended)
                values.append(None if is_masked else (reward - mean) / scale)
        return values

    def parts(self, module: nn.Module) -> tuple[Part, ...]:
        from toolkit_align.log_probs import balancing_parts

        logged = [Part(name, ANSWERS, 0) for name in self._logged(module)]
        return (Part(LOSS), *balancing_parts(module), *logged) if module.training else tuple(logged)

    def sums(self, model: nn.Module, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        from toolkit_align.log_probs import BALANCING

        logged = {name: batch.value(name, device).sum() for name in self._logged(model)}
        if not model.training:
            return logged
        log_probs, balancing = self._log_probs(model, batch, device)
        mask = (batch.labels != IGNORE_INDEX).to(device)
        log_probs = log_probs[mask]  # none if the batch has no answer to train on, and no targets then
        targets = batch.values["targets"].to(device) if len(log_probs) else log_probs.new_zeros(0, 2)
        decoder, advantage = targets.unbind(1)
        loss = -(advantage * (log_probs - log_probs.detach()).exp()).sum()
        self.differences.append((log_probs.detach() - decoder).abs())
        return {LOSS: loss, BALANCING: balancing} | logged

    def _logged(self, module: nn.Module) -> list[str]:
        """Return the names of what is logged of answers."""
        each = [f"{REWARD}_{name}" for name in self._names if len(self._names) > 1]
        return [REWARD, *each, *LOGGED, *[DROPPED] * module.training]

    def _log_probs(self, model: nn.Module, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of the labels as the decoder samples them, (B, T) fp32, and the balancing loss.

        At the temperature, and over the tokenizer's vocabulary: the padding of the head is never sampled.
        """
        from toolkit.models.cross_entropy import cross_entropy_
        from toolkit.models.loss import head_loss
        from toolkit.objectives.inputs import run_with_head

        def at_temperature(logits: Tensor, targets: Tensor, ignored: Tensor, bias: Any, *rest: Any) -> Any:
            logits = (logits if bias is None else logits.add_(bias)).div_(self.temperature)  # in fp32
            losses, gradient = cross_entropy_(logits, targets, ignored, None, *rest)
            return losses, None if gradient is None else gradient.div_(self.temperature)

        def head(gpt: Any, x: Tensor, labels: Tensor) -> Tensor:
            head, size = gpt.lm_head, gpt.config.vocab_size
            x, low_rank = gpt.head_input(x), None
            if not head.adapters_off:
                hidden, b = head.low_rank(x, x.dtype)
                low_rank = hidden, b[:size]
            bias = None if head.bias is None else head.bias[:size]
            softcap = gpt.config.final_logit_softcapping
            softcap = None if softcap is None else softcap / self.temperature
            values = head_loss(x, head.weight[:size], bias, labels, low_rank, softcap, at_temperature, log_probs=True)
            return values.clone()  # FSDP warns of views

        return run_with_head(model, batch, device, head)
