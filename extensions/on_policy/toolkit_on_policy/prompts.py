"""The data module of prompts that the model answers while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from toolkit.data.base import Content, DataModule, PreparedData, Report, Row, TokenDataset, held_out_fraction
from toolkit.errors import UserError

if TYPE_CHECKING:
    from toolkit_metric.prompts import Prompt

    from toolkit.data.tokenizer import Tokenizer


class PromptRows(TokenDataset):
    """Rows with the tokens of a prompt, and no token with loss."""

    is_ragged = True  # with its answer, a row may have any length

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return len(self.prompts)

    def where(self, index: int) -> list[str]:  # type: ignore[override]
        return [f"{self.prompts[index].where}, reference {self.prompts[index].reference!r:.80}"]

    def __getitem__(self, index: int) -> Row:
        import torch

        from toolkit.models.labels import IGNORE_INDEX

        self.require_row(index)
        ids = torch.tensor(self.prompts[index].ids)
        return {"input_ids": ids, "labels": torch.full_like(ids, IGNORE_INDEX)}


@dataclass
class Prompts(DataModule):
    """Prompts for --objective GRPO and OnPolicyDistillation: rows of instruction data, without their last answer.

    Rewards get the answer as the reference, and the row with all its fields.

    Args:
        json_path: A .json, .jsonl, .csv or .parquet file, or a folder with a file per split, as in --data JSON.
        val_split_fraction: Fraction of prompts held out for validation, the rows that --data JSON holds out; 0 for
            none. Default 0.05, unless there is a validation file.
        columns: Column name mapping, such as '{"prompt": "question", "completion": "reply"}'.
    """

    json_path: str
    val_split_fraction: float | None = None
    columns: dict[str, str] | None = None

    content: ClassVar[Content] = "answers"

    def prepare(
        self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print, kind: str = "answers"
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`."""
        from toolkit_metric.prompts import make_prompt, prompt_template

        from toolkit.data.cache import hash_inputs
        from toolkit.data.sft.datasets import find_file_splits
        from toolkit.data.sft.prepare_sft import held_out_samples
        from toolkit.data.sft.readers import describe_row

        if tokenizer is None:
            raise UserError("--data Prompts: needs the tokenizer of the model; specify --tokenizer_dir")
        template, (_, splits) = prompt_template(tokenizer), find_file_splits(self, "json_path")
        train, val = (
            [
                make_prompt(row, describe_row(source, number), self.columns, template)
                for source in sources or ()
                for number, row in source.rows()
            ]
            for sources in (splits.train, splits.val)
        )
        fraction = held_out_fraction(self.val_split_fraction, splits.val)
        held_out = {*held_out_samples(len(train), fraction).tolist()}  # those of --data JSON
        val += [train[i] for i in sorted(held_out)]
        train = [prompt for i, prompt in enumerate(train) if i not in held_out]
        key = hash_inputs([[[prompt.ids, prompt.row] for prompt in prompts] for prompts in (train, val)])
        summary = f"{len(train):,} prompts to train on, {len(val):,} held out"
        report(f"Data: {summary}")
        return PreparedData(PromptRows(train), PromptRows(val), tokenizer, key, summary)
