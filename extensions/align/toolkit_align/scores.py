"""Objectives of models with a score layer: classification, and rewards from pairs (Bradley-Terry).

The score of a text is read at its last token, the only one with a label. Of a token reward, each token of a completion
has a score, and r is their mean (as in arXiv 2306.00398). The loss of a row is

| objective | loss | as in |
|---|---|---|
| one label per text | cross-entropy | transformers |
| several labels per text | mean over labels of the binary cross-entropy | transformers |
| regression | (score - label)^2, mean over numbers | transformers |
| reward of a pair | -log s(r(chosen) - r(rejected) - margin) | arXiv 2203.02155, eq. 1; 2307.09288, eq. 2 |

s is the logistic function.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.models.config_checks import HeadName
from toolkit.models.labels import IGNORE_INDEX
from toolkit.objectives.base import LOSS, Objective, Part
from toolkit_align.log_probs import BALANCING, balancing_parts, has_balancing
from toolkit_align.preference import PairObjective

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from toolkit.data.base import RowKind
    from toolkit.data.batch import Batch


@dataclass
class Classification(Objective):
    """Classify texts, or predict a number, from the labels of --data Classification. --head classification implies it.

    The loss is a mean over texts, with the weight of each label. Metrics: accuracy (of several labels: all of them are
    right) and the macro mean of F1, or Spearman's rank correlation, its mean over several numbers.
    """

    head, row_kind = "classification", "labeled"
    higher_is_better = dict.fromkeys(("accuracy", "f1", "spearman"), True)

    def parts(self, module: "nn.Module") -> tuple[Part, ...]:
        return (Part(LOSS), *balancing_parts(module))

    def sums(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "dict[str, Tensor]":
        import torch
        from torch.nn import functional as F

        from toolkit.objectives.inputs import original_module

        module: Any = original_module(model)
        problem_type = module.config.problem_type
        scores, _, sums = read_scores(model, batch, device)
        n_targets = 1 if problem_type == "single_label_classification" else scores.size(1)
        targets = batch.values["targets"].to(device) if len(scores) else scores.new_zeros(0, n_targets + 1)
        targets, weights = targets.split([n_targets, 1], dim=1)
        if self.outputs is not None:
            self.outputs.append(torch.cat([scores, targets], 1).double().cpu().numpy())
        match problem_type:
            case "regression":
                losses = (scores - targets).square().mean(1)
            case "multi_label_classification":
                losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)
            case _:
                losses = F.cross_entropy(scores, targets[:, 0].long(), reduction="none")
        return {LOSS: (losses * weights[:, 0]).sum()} | sums

    def metric_names(self, module: Any) -> tuple[str, ...]:
        return ("spearman",) if module.config.problem_type == "regression" else ("accuracy", "f1")

    def metrics(self, module: Any) -> dict[str, float]:
        import numpy as np

        from toolkit.distributed import ranks
        from toolkit_align.scoring import prediction_metrics

        outputs = np.concatenate([part for of_rank in ranks.all_gather_object(self.outputs) for part in of_rank])
        scores, targets = np.split(outputs, [module.config.n_labels], axis=1)
        return prediction_metrics(scores, targets, module.config.problem_type)


@dataclass
class Reward(PairObjective):
    """Train a reward model on pairs of completions: --data Preference, with an optional column margin.
    --head reward implies it.
    """

    head: ClassVar[HeadName | None] = "reward"
    row_kind: "ClassVar[RowKind]" = "compared"

    def sums(self, model: "nn.Module", batch: "Batch", device: "torch.device") -> "dict[str, Tensor]":
        from torch.nn.functional import logsigmoid

        scores, rows, sums = read_scores(model, batch, device)
        chosen, rejected = mean_scores(scores, rows).view(-1, 2).unbind(1)
        margins = batch.values["targets"].to(device)[::2, 0] if len(scores) else chosen
        values = {LOSS: -logsigmoid(chosen - rejected - margins), "reward_chosen": chosen, "reward_rejected": rejected}
        return self.sums_of_pairs(values) | sums


@dataclass
class TokenReward(Reward):
    """Train a model that rewards each token, on pairs of completions: as Reward, with the mean over the completion's
    tokens as its reward. --head token_reward implies it.
    """

    head, row_kind = "token_reward", "compared_tokens"


def read_scores(
    model: "nn.Module", batch: "Batch", device: "torch.device"
) -> "tuple[Tensor, Tensor, dict[str, Tensor]]":
    """Return the scores at the n labels, (n, n_labels) fp32, the row of each, (n,) ascending, and the load-balancing
    sum."""
    from toolkit.objectives.inputs import original_module, run_with_head

    rows, columns = (i.to(device) for i in (batch.labels != IGNORE_INDEX).nonzero(as_tuple=True))
    scores, balancing = run_with_head(model, batch, device, lambda model, x, labels: model.scores(x[rows, columns]))
    return scores, rows, {BALANCING: balancing} if has_balancing(original_module(model)) else {}


def mean_scores(scores: "Tensor", rows: "Tensor") -> "Tensor":
    """Return the mean of the first score over the labels of each row that has labels."""
    _, index, counts = rows.unique_consecutive(return_inverse=True, return_counts=True)
    return scores.new_zeros(len(counts)).index_add(0, index, scores[:, 0]) / counts
