"""The data module of preferences: pairs of completions, or rated ones."""

from dataclasses import dataclass
from typing import Any, ClassVar

from toolkit.data.base import Content, PreparedData, RowKind, require_one
from toolkit.data.sft.datasets import InstructionData, find_file_splits, find_hub_splits
from toolkit.data.sft.readers import Splits
from toolkit.data.sft.schemas import known_columns
from toolkit.data.tokenizer import Tokenizer


@dataclass
class Preference(InstructionData):
    """Preferences for DPO, ORPO, SimPO, KTO and --head reward: a prompt with a chosen and a rejected completion, or a
    rated one.

    Rows have prompt, chosen and rejected, and for --head reward optionally margin; for KTO also prompt, completion and
    label. Prompt and completions are strings
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

    content: ClassVar[Content] = "preferences"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one(self, "json_path", "repo_id")

    def find_rows(self) -> tuple[str, Splits]:
        """See :meth:`InstructionData.find_rows`."""
        return find_hub_splits(self) if self.repo_id else find_file_splits(self, "json_path")

    def prepare(self, *, tokenizer: Tokenizer | None, kind: RowKind = "answers", **options: Any) -> PreparedData:
        """See :meth:`InstructionData.prepare`. Without a kind, rows with a label are rated, and others pairs."""
        if kind == "answers":
            _, splits = self.find_rows()
            kind = "rated" if "label" in known_columns(splits.first_row(), self.columns) else "pairs"
        return super().prepare(tokenizer=tokenizer, kind=kind, **options)
