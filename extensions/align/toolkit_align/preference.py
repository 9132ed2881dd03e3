"""Objectives over pairs of completions: DPO, ORPO and SimPO.

A completion y of a prompt x has the log-probability log p(y|x), the sum over its tokens. c and r are the chosen and the
rejected completion, |y| is the number of tokens, and s the logistic function. The loss is a mean over pairs.

| objective | loss of a pair | source |
|---|---|---|
| DPO, sigmoid | -log s(beta (d(c) - d(r))), d(y) = log p(y) - log p_ref(y) | arXiv 2305.18290, eq. 7 |
| sigmoid_norm | the same with d(y) / abs(y) | |
| hinge | max(0, 1 - beta (d(c) - d(r))) | arXiv 2305.10425 |
| ipo | (d(c) / abs(c) - d(r) / abs(r) - 1 / (2 beta))^2 | arXiv 2310.12036, eq. 17, per token as its authors do |
| apo_zero | 1 - s(beta d(c)) + s(beta d(r)) | arXiv 2408.06266, eq. 7 |
| ORPO | -a(c) - beta log s(o(c) - o(r)), o(y) = a(y) - log(1 - exp a(y)) | arXiv 2403.07691, eq. 6 and 7 |
| SimPO | -log s(beta (a(c) - a(r)) - gamma) | arXiv 2405.14734, eq. 6 |

a(y) is log p(y) / abs(y). With label smoothing e, -log s(z) becomes -(1 - e) log s(z) - e log s(-z).
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

from toolkit.config.checks import require_not_negative, require_positive
from toolkit.errors import require_option
from toolkit.models.labels import IGNORE_INDEX, TOKENS
from toolkit.objectives.base import LOSS, Objective, Part
from toolkit_align.log_probs import REFERENCE, balancing_parts, initial_log_probs, label_log_probs

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.base import PreparedData
    from toolkit.data.batch import Batch

LossType = Literal["sigmoid", "sigmoid_norm", "ipo", "hinge", "apo_zero"]
PAIRS = "pairs"
OF_ANSWERS = {"reward_chosen": True, "reward_rejected": False, "log_prob_chosen": True, "log_prob_rejected": False}
"""Logged of the completions; whether the highest value is the best."""


class Answers(NamedTuple):
    """The chosen, or the rejected, completions of n pairs."""

    log_prob: "Tensor"
    """(n,) fp32: sum over the tokens, in nats."""
    tokens: "Tensor"
    """(n,) fp32: number of tokens."""
    reference: "Tensor"
    """(n,) fp32: log-probability under the reference model; 0 without one."""

    @property
    def mean(self) -> "Tensor":
        """Mean log-probability per token, (n,)."""
        return self.log_prob / self.tokens

    @property
    def ratio(self) -> "Tensor":
        """log p - log p_ref, (n,)."""
        return self.log_prob - self.reference


@dataclass
class PairObjective(Objective):
    """An objective over pairs of completions, each with a reward."""

    normalizers = (TOKENS, PAIRS)
    rows_per_sample = 2
    epochs = 1.0
    higher_is_better = {**OF_ANSWERS, "accuracy": True, "reward_margin": True}
    logged: ClassVar[tuple[str, ...]] = ("accuracy", "reward_chosen", "reward_rejected", "reward_margin")

    def parts(self, module: "nn.Module") -> tuple[Part, ...]:
        return (Part(LOSS, PAIRS), *balancing_parts(module), *(Part(name, PAIRS, weight=0) for name in self.logged))

    def count(self, batch: "Batch") -> dict[str, int]:
        return {PAIRS: sum(row >= 0 for row in batch.ids[::2])}

    @staticmethod
    def sums_of_pairs(values: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Return the sums of the values of n pairs, (n,) each, and of margin and accuracy.

        Args:
            values: The loss, "reward_chosen", "reward_rejected" and others.
        """
        values["reward_margin"] = values["reward_chosen"] - values["reward_rejected"]
        values["accuracy"] = (values["reward_margin"] > 0).float()
        return {name: (value if name == LOSS else value.detach()).sum() for name, value in values.items()}


@dataclass
class LikelihoodObjective(PairObjective):
    """An objective over the log-probabilities of both completions."""

    row_kind = "pairs"
    learning_rates = (5e-6, 5e-7)
    logged: ClassVar[tuple[str, ...]] = (
        "reward_chosen",
        "reward_rejected",
        "log_prob_chosen",
        "log_prob_rejected",
        "reward_margin",
        "accuracy",
    )

    @abstractmethod
    def of_pairs(self, chosen: "Answers", rejected: "Answers") -> "dict[str, Tensor]":
        """Return the loss, the rewards "reward_chosen" and "reward_rejected", and further parts, (n,) each."""

    def sums(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "dict[str, Tensor]":
        import torch

        reference = self.reference(model, batch, device)
        log_probs, balancing_sums = label_log_probs(model, batch, device)
        tokens = (batch.labels != IGNORE_INDEX).sum(1).float().to(device)
        rows = torch.tensor([i for i, row in enumerate(batch.ids) if row >= 0], dtype=torch.int64, device=device)
        rows = rows.view(-1, 2)  # without fillers, which would have no tokens to divide by
        chosen, rejected = (Answers(log_probs[rows[:, i]], tokens[rows[:, i]], reference[rows[:, i]]) for i in range(2))
        values = self.of_pairs(chosen, rejected)
        values |= {"log_prob_chosen": chosen.log_prob, "log_prob_rejected": rejected.log_prob}
        return self.sums_of_pairs(values) | balancing_sums

    def reference(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "Tensor":
        """Return the log-probability of each row under the reference model, (B,) fp32; zeros if there is none."""
        import torch

        return torch.zeros(len(batch.ids), device=device)


@dataclass
class DPO(LikelihoodObjective):
    """Direct preference optimization: prefer the chosen completions, relative to a reference model.

    The reference is the initial model: without adapters in finetune_lora; in finetune_full its log-probabilities are
    computed once, before training, and cached.

    Args:
        beta: Strength of the pull towards the reference.
        loss_type: Loss of a pair. "sigmoid" is DPO's; "sigmoid_norm" divides log-probabilities by the number of tokens.
        label_smoothing: Share of pairs whose label may be wrong; for sigmoid and sigmoid_norm.
        sft_weight: Weight of the negative log-likelihood per token of the chosen completions.
        reference_dir: Checkpoint of another reference model with the same tokenizer.
    """

    beta: float = 0.1
    loss_type: LossType = "sigmoid"
    label_smoothing: float = 0.0
    sft_weight: float = 0.0
    reference_dir: str | None = None

    has_reference = True
    logged = (*LikelihoodObjective.logged, "sft_loss")

    def __post_init__(self) -> None:
        require_positive("objective", self, "beta")
        hint = f"must be one of {', '.join(get_args(LossType))}"
        require_option(self.loss_type in get_args(LossType), "objective.loss_type", self.loss_type, hint)
        require_not_negative("objective", self, "sft_weight")
        _require_smoothing(self.label_smoothing)
        hint = f"has no effect with --objective.loss_type {self.loss_type}; remove it"
        is_used = not self.label_smoothing or self.loss_type.startswith("sigmoid")
        require_option(is_used, "objective.label_smoothing", self.label_smoothing, hint)

    def of_pairs(self, chosen: "Answers", rejected: "Answers") -> "dict[str, Tensor]":
        sft_loss = -chosen.mean
        loss = self._loss(chosen, rejected)
        return {
            LOSS: loss + self.sft_weight * sft_loss if self.sft_weight else loss,
            "reward_chosen": self.beta * chosen.ratio,
            "reward_rejected": self.beta * rejected.ratio,
            "sft_loss": sft_loss,
        }

    def prepare(self, launch: Any) -> "PreparedData":
        from toolkit_align.reference import with_reference

        return with_reference(launch)

    def reference(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "Tensor":
        from toolkit.models.lora import has_adapters
        from toolkit.objectives.inputs import original_module

        if self.reference_dir is None and has_adapters(original_module(model)):
            return initial_log_probs(model, batch, device)
        return batch.value(REFERENCE, device)

    def _loss(self, chosen: "Answers", rejected: "Answers") -> "Tensor":
        from torch.nn.functional import relu

        margin = chosen.ratio - rejected.ratio
        margin_per_token = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
        match self.loss_type:
            case "hinge":
                return relu(1 - self.beta * margin)
            case "ipo":
                return (margin_per_token - 1 / (2 * self.beta)).square()
            case "apo_zero":
                return 1 - (self.beta * chosen.ratio).sigmoid() + (self.beta * rejected.ratio).sigmoid()
            case "sigmoid_norm":
                return _smoothed(self.beta * margin_per_token, self.label_smoothing)
            case "sigmoid":
                return _smoothed(self.beta * margin, self.label_smoothing)


@dataclass
class ORPO(LikelihoodObjective):
    """Odds ratio preference optimization: imitate the chosen completions, and prefer them; without a reference model.

    Args:
        beta: Weight of the odds ratio; lambda in the paper.
    """

    beta: float = 0.1

    logged = (*LikelihoodObjective.logged, "sft_loss", "odds_loss")

    def __post_init__(self) -> None:
        require_positive("objective", self, "beta")

    def of_pairs(self, chosen: "Answers", rejected: "Answers") -> "dict[str, Tensor]":
        from torch.nn.functional import logsigmoid

        odds_loss = -logsigmoid(_log_odds(chosen.mean) - _log_odds(rejected.mean))
        return {
            LOSS: -chosen.mean + self.beta * odds_loss,
            "reward_chosen": self.beta * chosen.mean,
            "reward_rejected": self.beta * rejected.mean,
            "sft_loss": -chosen.mean,
            "odds_loss": odds_loss,
        }


@dataclass
class SimPO(LikelihoodObjective):
    """Simple preference optimization: log-probabilities per token, with a margin; without a reference model.

    Args:
        beta: Scale of the rewards.
        gamma: Margin between the rewards of both completions; about half of beta.
        label_smoothing: Share of pairs whose label may be wrong.
    """

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        require_positive("objective", self, "beta")
        require_not_negative("objective", self, "gamma")
        _require_smoothing(self.label_smoothing)

    def of_pairs(self, chosen: "Answers", rejected: "Answers") -> "dict[str, Tensor]":
        rewards = self.beta * chosen.mean, self.beta * rejected.mean
        loss = _smoothed(rewards[0] - rewards[1] - self.gamma, self.label_smoothing)
        return {LOSS: loss, "reward_chosen": rewards[0], "reward_rejected": rewards[1]}


def _require_smoothing(value: float) -> None:
    require_option(0 <= value < 0.5, "objective.label_smoothing", value, "must be at least 0 and less than 0.5")


def _smoothed(z: "Tensor", smoothing: float) -> "Tensor":
    from torch.nn.functional import logsigmoid

    loss = -(1 - smoothing) * logsigmoid(z)
    return loss - smoothing * logsigmoid(-z) if smoothing else loss


def _log_odds(log_p: "Tensor") -> "Tensor":
    """Return log(p / (1 - p)). A probability that rounds to 1 counts as the largest fp32 below it."""
    log_p = log_p.clamp(max=-(2.0**-24))
    return log_p - (-log_p.expm1()).log()
