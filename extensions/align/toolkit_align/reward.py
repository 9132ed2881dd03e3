"""The metric ``reward:FOLDER``: the score of a reward model for generated answers."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from toolkit.data.sft.schemas import Record
from toolkit.errors import UserError
from toolkit_align.labels import MULTI, SINGLE
from toolkit_align.text_scorer import TextScorer


def reward(
    answers: Sequence[str], references: Sequence[str | None], prompts: Sequence[dict[str, Any]], folder: str
) -> dict[str, list[float]]:
    """The score of a reward model, a checkpoint folder, for each answer after its prompt. Computed on the CPU."""
    scorer = _load_scorer(folder)
    encodings = [
        scorer.encode_answer(Record(tuple(prompt["messages"]), None, prompt["where"], prompt["tools"]), answer)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return {"reward": [predictions[0] for predictions in scorer.predict(encodings)]}


reward.needs_prompts = reward.higher_is_better = True  # type: ignore[attr-defined]


@lru_cache(1)
def _load_scorer(folder: str) -> Any:
    scorer = TextScorer(folder, base_checkpoint_dir=None, accelerator="cpu", precision=None)
    if scorer.config.problem_type in (SINGLE, MULTI) or scorer.config.n_labels > 1:
        raise UserError(f"checkpoint_dir {folder}: predicts labels, not a number; train one with --head reward")
    return scorer
