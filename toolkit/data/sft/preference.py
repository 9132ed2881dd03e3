"""The data module of preferences: pairs of completions, or rated ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.data.base import PreparedData, RowKind, require
from toolkit.data.sft.datasets import find_hub_splits
from toolkit.data.sft.instruct import InstructionData
from toolkit.data.sft.readers import KINDS, Splits, find_splits
from toolkit.data.tokenizer import Tokenizer


@dataclass
class Preference(InstructionData):
    """Preferences for DPO, ORPO, SimPO and KTO: a prompt with a chosen and a rejected completion, or a rated one.

    Rows have prompt, chosen and rejected; for KTO also prompt, completion and label. Prompt and completions are strings
    or lists of messages. Without a prompt, it is what both completions begin with.

    Args:
        json_path: A .json, .jsonl, .csv or .parquet file, or a folder with a file per split, as in --data JSON.
        repo_id: Instead of a file: a dataset on the Hugging Face hub. Rows with empty or equal answers are skipped.
        subset: Dataset configuration (subset) name.
        split: Training split, such as train or train_prefs.
        val_split: Validation split; by default, a fraction of training rows is held out.
    """

    json_path: str | None = None
    repo_id: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        hint = "is not supported with --data.repo_id; remove one of them (--data.repo_id null overrides a file)"
        require(not (self.json_path and self.repo_id), "json_path", self.json_path, hint)

    @property
    def skips_empty_answers(self) -> bool:  # type: ignore[override]  # users cannot fix published datasets
        return bool(self.repo_id)

    def find_rows(self) -> tuple[str, Splits]:
        """See :meth:`InstructionData.find_rows`."""
        if self.repo_id:
            return find_hub_splits(self.repo_id, self.subset, self.split, self.val_split)
        return f"--data.json_path {self.json_path}", find_splits(self.json_path, "json_path", KINDS)

    def prepare(self, *, tokenizer: Tokenizer | None, kind: RowKind = "answers", **options: Any) -> PreparedData:
        """See :meth:`InstructionData.prepare`. Without a kind, rows with a label are rated, and others pairs."""
        if kind == "answers":
            _, splits = self.find_rows()
            row = next((row for source in splits.train for _, row in source.rows()), None)
            kind = "rated" if isinstance(row, dict) and "label" in row else "pairs"
        return super().prepare(tokenizer=tokenizer, kind=kind, **options)
