"""Kahneman-Tversky optimization: completions that are good or bad, without pairs."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.config.checks import require_positive
from toolkit.models.labels import TOKENS
from toolkit.objectives.base import LOSS, Objective, Part
from toolkit_align.log_probs import balancing_parts, initial_log_probs, label_log_probs
from toolkit_align.preference import OF_ANSWERS

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.batch import Batch

SAMPLES, GOOD, BAD = "samples", "good", "bad"


@dataclass
class KTO(Objective):
    """Kahneman-Tversky optimization: make good completions more likely and bad ones less, relative to a reference.

    With d = log p - log p_ref and the logistic function s, the loss is a mean over samples of (arXiv 2402.01306, eq. 8)

    - good: desirable_weight (1 - s(beta (d - z))),
    - bad: undesirable_weight (1 - s(beta (z - d))).

    z estimates the KL divergence from the reference, without a gradient: the mean of d over the samples of the global
    batch, each with the completion of the sample before it; at least 0, and 0 for a batch of one sample.

    The reference is the initial model: without adapters in finetune_lora, a frozen copy in memory in finetune_full.

    Args:
        beta: Strength of the pull towards the reference.
        desirable_weight, undesirable_weight: Weights of good and bad completions. Their ratio times the ratio of their
            numbers should be from 1 to 4/3.
        reference_dir: Checkpoint of another reference model with the same tokenizer.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_dir: str | None = None

    normalizers = (TOKENS, SAMPLES, GOOD, BAD)
    looks_ahead = has_reference = True
    row_kind = "rated"
    epochs, learning_rates = 1.0, (5e-6, 5e-7)
    higher_is_better = OF_ANSWERS
    _kl = 0.0

    def __post_init__(self) -> None:
        require_positive("objective", self, "beta", "desirable_weight", "undesirable_weight")

    @property
    def frozen_option(self) -> str:  # type: ignore[override]
        return "" if self.reference_dir is None else "reference_dir"

    def for_run(self, args: Any) -> "KTO":
        if args.command == "finetune_full" and self.reference_dir is None:
            return replace(self, reference_dir=args.initial_checkpoint_dir)
        return self

    def parts(self, module: "nn.Module") -> tuple[Part, ...]:
        names = {"reward_chosen": GOOD, "reward_rejected": BAD, "log_prob_chosen": GOOD, "log_prob_rejected": BAD}
        logged = (Part(name, count, weight=0) for name, count in (names | {"kl": SAMPLES}).items())
        return (Part(LOSS, SAMPLES), *balancing_parts(module), *logged)

    def count(self, batch: "Batch") -> dict[str, int]:
        samples, labels = sum(row >= 0 for row in batch.ids[::2]), batch.values.get("label")
        good = 0 if labels is None else int(labels[::2].sum())
        n_tokens = int((batch.labels[::2] >= 0).sum())  # the load-balancing loss has only the samples themselves
        return {TOKENS: n_tokens, SAMPLES: samples, GOOD: good, BAD: samples - good}

    def look_ahead(self, model: "nn.Module", batches: "Iterable[Batch]", device: "torch.device") -> None:
        import torch

        from toolkit.distributed import ranks

        total = torch.zeros(2, device=device)  # the sum over the mismatched completions, and their number
        for batch in batches:
            mismatched = batch.every(1, 2)
            with torch.no_grad():
                ratio = label_log_probs(model, mismatched, device)[0] - self._reference(model, mismatched, device)
            total += torch.stack([ratio.sum(), ratio.new_tensor(sum(row >= 0 for row in mismatched.ids))])
        if not ranks.is_first("tensor"):
            total.zero_()  # ranks of a tensor group compute the same
        kl, number = ranks.sum_over_ranks(total).tolist()
        self._kl = max(0.0, kl / number) if number > 1 else 0.0

    def sums(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "dict[str, Tensor]":
        import torch

        batch = batch.every(0, 2)
        reference = self._reference(model, batch, device)
        log_probs, balancing_sums = label_log_probs(model, batch, device)
        is_good = batch.value("label", device)
        is_bad = torch.tensor([float(row >= 0) for row in batch.ids], device=device) - is_good
        ratio = log_probs - reference  # of a filler 0
        good = self.desirable_weight * (1 - (self.beta * (ratio - self._kl)).sigmoid())
        bad = self.undesirable_weight * (1 - (self.beta * (self._kl - ratio)).sigmoid())
        sums = {LOSS: (is_good * good + is_bad * bad).sum(), "kl": self._kl * (is_good + is_bad).sum()}
        for name, mask in (("chosen", is_good), ("rejected", is_bad)):
            sums[f"reward_{name}"] = self.beta * (mask * ratio.detach()).sum()
            sums[f"log_prob_{name}"] = (mask * log_probs.detach()).sum()
        return sums | balancing_sums

    def _reference(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "Tensor":
        import torch

        if self.frozen is None:
            return initial_log_probs(model, batch, device)
        with torch.no_grad():
            return label_log_probs(self.frozen, batch, device)[0]
