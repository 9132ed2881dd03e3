"""Base class of instruction data modules: conversations and plain text for finetuning, optionally packed."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from toolkit.data.base import (
    DataModule,
    OnLong,
    Packing,
    PreparedData,
    Report,
    RowKind,
    TrainOn,
    cache_prefix,
    held_out_fraction,
    require_one,
    require_val_fraction,
)
from toolkit.data.sft.readers import Splits
from toolkit.data.sft.schemas import require_columns
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError


@dataclass(kw_only=True)
class InstructionData(DataModule):
    """Rows with instruction/input/output, prompt/completion, messages, conversations or text, detected per row.

    Args:
        val_split_fraction: Fraction of samples held out for validation; 0 for none. Default 0.05, unless there is a
            validation file.
        prompt_style: Chat template: alpaca, chatml, llama2, llama3, ...; by default, the checkpoint's.
        chat_template: Jinja file with a custom chat template, which is saved with the model.
        mask_prompt: Mask the loss on prompts; false also trains on prompts.
        train_on: Tokens with loss: all answers, the last answer, or all tokens. Default "answers".
        on_long: What to do with samples longer than a row: truncate the end, drop the sample, split it into rows, or
            raise an error.
        packing: "best_fit" packs several samples into each row, without attention between them.
        columns: Column name mapping, such as '{"prompt": "question", "completion": "reply"}'.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    val_split_fraction: float | None = None
    prompt_style: str | None = None
    chat_template: str | None = None
    mask_prompt: bool = True
    train_on: TrainOn | None = None
    on_long: OnLong = "truncate"
    packing: Packing = "none"
    columns: dict[str, str] | None = None
    cache_dir: str | None = None
    num_workers: int = 0

    # Whether to skip rows with an empty answer instead of raising an error. Users cannot fix published datasets.
    skips_empty_answers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_val_fraction(self, "val_split_fraction")
        require_one(self, "chat_template", "prompt_style")
        if not self.mask_prompt and self.train_on not in (None, "all"):
            raise UserError(f"--data.mask_prompt false: trains on all tokens, but --data.train_on is {self.train_on}")
        require_columns(self.columns)

    @abstractmethod
    def find_rows(self) -> tuple[str, Splits]:
        """Return the data option, such as ``--data.json_path faq.jsonl``, and the row sources."""

    def prepare(
        self,
        *,
        tokenizer: Tokenizer | None,
        max_seq_length: int,
        report: Report = print,
        kind: RowKind = "answers",
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`; rows have up to ``max_seq_length`` input tokens. ``kind``: what a row is."""
        name = type(self).__name__
        if kind != "answers":
            self._require_completions()
        if tokenizer is None:
            raise UserError(f"--data {name}: needs the tokenizer of the model; specify --tokenizer_dir")
        if max_seq_length <= 0:
            raise UserError(f"--train.max_seq_length {max_seq_length}: must be greater than zero for --data {name}")
        from toolkit.data.chat.template import ChatTemplate
        from toolkit.data.sft.prepare import prepare_sft
        from toolkit.data.sft.tokenize import SFTConfig

        option, splits = self.find_rows()
        fraction = self.val_split_fraction
        if splits.val is not None and fraction is not None:
            raise UserError(f"--data.val_split_fraction {fraction}: remove it: {option} has validation rows")
        template, no_template = None, None
        try:
            template = ChatTemplate.from_tokenizer(tokenizer, self.prompt_style, self.chat_template)
        except UserError as error:
            if self.prompt_style is not None or self.chat_template is not None:
                raise
            no_template = error  # plain text needs no template
            row = splits.first_row()
            if isinstance(row, dict) and {"instruction", "output"} <= row.keys():
                template = ChatTemplate.from_tokenizer(tokenizer, "alpaca")
                report("Data: the model has no chat template; rows with instruction and output use alpaca's")
        config = SFTConfig(
            module=cache_prefix(self),
            kind=kind,
            option=option,
            splits=splits,
            tokenizer=tokenizer,
            template=template,
            no_template=no_template,
            columns=self.columns,
            skip_empty=self.skips_empty_answers,
            train_on=self.train_on or ("answers" if self.mask_prompt else "all"),
            on_long=self.on_long,
            packing=self.packing,
            max_seq_length=max_seq_length,
            val_fraction=held_out_fraction(fraction, splits.val),
            cache_dir=self.cache_dir,
        )
        return prepare_sft(config, report)

    def _require_completions(self) -> None:
        """Raise UserError for an option that preferences do not support."""
        refused = {
            "mask_prompt false": not self.mask_prompt,
            f"train_on {self.train_on}": self.train_on not in (None, "answers"),
            f"packing {self.packing}": self.packing != "none",
            "on_long split": self.on_long == "split",
        }
        for option in (option for option, is_set in refused.items() if is_set):
            raise UserError(f"--data.{option}: is not supported with preferences, which compare completions; remove it")
