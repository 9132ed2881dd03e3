"""Data modules for instruction data and preferences: local files, Hugging Face datasets, published datasets by name."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from toolkit.data.base import (
    Content,
    DataModule,
    LabelSet,
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
from toolkit.data.cache import require_preparation
from toolkit.data.sft.first_rows import first_records
from toolkit.data.sft.readers import CSV_KINDS, JSON_KINDS, KINDS, PARQUET_KINDS, HubRows, Splits, find_splits
from toolkit.data.sft.schemas import known_columns, parse_row, require_columns
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, one_line, require_package


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

    content: ClassVar[Content] = "answers"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_val_fraction(self, "val_split_fraction")
        require_one(self, "chat_template", "prompt_style")
        if not self.mask_prompt and self.train_on not in (None, "all"):
            raise UserError(f"--data.mask_prompt false: trains on all tokens, but --data.train_on is {self.train_on}")
        require_columns(self.columns)

    def check_first_rows(self, kind: RowKind, model_labels: LabelSet | None) -> None:
        first_records(self, lambda row, where, _: parse_row(row, where, self.columns, kind))

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
        if kind != "answers":
            self._require_completions()
        return prepare_rows(
            self,
            tokenizer,
            max_seq_length,
            report,
            kind=kind,
            columns=self.columns,
            train_on=self.train_on or ("answers" if self.mask_prompt else "all"),
        )

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


def prepare_rows(
    data: Any, tokenizer: Tokenizer | None, max_seq_length: int, report: Report, **options: Any
) -> PreparedData:
    """Prepare the rows of a data module with ``find_rows`` and the options of instruction data.

    ``options``: further fields of :class:`toolkit.data.sft.tokenize.SFTConfig`.
    """
    if tokenizer is None:
        raise UserError(f"--data {type(data).__name__}: needs the tokenizer of the model; specify --tokenizer_dir")
    from toolkit.data.chat.template import ChatTemplate
    from toolkit.data.sft.prepare_sft import prepare_sft
    from toolkit.data.sft.tokenize import SFTConfig

    option, splits = data.find_rows()
    fraction = data.val_split_fraction
    if splits.val is not None and fraction is not None:
        raise UserError(f"--data.val_split_fraction {fraction}: remove it: {option} has validation rows")
    template, no_template = None, None
    try:
        template = ChatTemplate.from_tokenizer(tokenizer, data.prompt_style, data.chat_template)
    except UserError as error:
        if data.prompt_style is not None or data.chat_template is not None:
            raise
        no_template = error  # plain text needs no template
        if {"instruction", "output"} <= known_columns(splits.first_row(), options.get("columns")).keys():
            template = ChatTemplate.from_tokenizer(tokenizer, "alpaca")
            report("Data: the model has no chat template; rows with instruction and output use alpaca's")
    config = SFTConfig(
        module=cache_prefix(data),
        option=option,
        splits=splits,
        tokenizer=tokenizer,
        template=template,
        no_template=no_template,
        skip_empty=bool(getattr(data, "repo_id", None)),  # users cannot fix published datasets
        on_long=data.on_long,
        packing=data.packing,
        max_seq_length=max_seq_length,
        val_fraction=held_out_fraction(fraction, splits.val),
        cache_dir=data.cache_dir,
        **options,
    )
    return prepare_sft(config, report)


@dataclass
class _Files(InstructionData):
    """Rows from a file, or from a folder with a file per split."""

    path_option: ClassVar[str]
    kinds: ClassVar[dict[str, str]]

    def find_rows(self) -> tuple[str, Splits]:
        return find_file_splits(self, self.path_option, self.kinds)


@dataclass
class JSON(_Files):
    """Instruction data from a JSON or JSON Lines file.

    Args:
        json_path: A .jsonl with one row per line; a .json with a list of rows or {"train": [...], "val": [...]}; or a
            folder with train.json[l] and optionally val.json[l] (also validation or test).
    """

    json_path: str

    path_option = "json_path"
    kinds = JSON_KINDS


@dataclass
class CSV(_Files):
    """Instruction data from a CSV file with a header line.

    Args:
        csv_path: The file, or a folder with train.csv and optionally val.csv (also validation or test).
    """

    csv_path: str

    path_option = "csv_path"
    kinds = CSV_KINDS


@dataclass
class Parquet(_Files):
    """Instruction data from a Parquet file.

    Args:
        parquet_path: The file, or a folder with train.parquet (or train-*.parquet) and optionally val.parquet
            (also validation or test).
    """

    parquet_path: str

    path_option = "parquet_path"
    kinds = PARQUET_KINDS


def load_hub_split(repo_id: str, subset: str | None, split: str, option: str) -> HubRows:
    require_preparation()
    require_package("--data HuggingFace", "datasets", "3")
    import datasets
    from huggingface_hub import HfApi

    from toolkit.data.hub_errors import describe_hub_error, hub_error_types

    config, unreachable = datasets.config, None
    was_offline = config.HF_HUB_OFFLINE
    try:
        if not was_offline and not Path(repo_id).exists():
            HfApi().dataset_info(repo_id, timeout=10)
    except hub_error_types() as error:
        unreachable = error
    try:
        # if unreachable, use the cache: the library would retry for a minute
        config.HF_HUB_OFFLINE = was_offline or unreachable is not None
        path, files = repo_id, None
        if Path(repo_id, "state.json").is_file():  # written by save_to_disk
            path, files = "arrow", f"{repo_id}/*.arrow"
        dataset = datasets.load_dataset(path, subset, data_files=files, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        if unreachable is not None:
            raise UserError(describe_hub_error(unreachable, repo_id, "main", kind="dataset")) from error
        raise UserError(f"{option}: {repo_id}, split {split}: cannot be loaded: {one_line(error)}") from error
    finally:
        config.HF_HUB_OFFLINE = was_offline
    name = " ".join(filter(None, [repo_id, subset, split]))
    if not len(dataset):
        raise UserError(f"{option}: {name} contains no rows")
    return HubRows(dataset, name)


def find_hub_splits(data: Any) -> tuple[str, Splits]:
    """Return the option ``--data.repo_id`` and the rows of the splits of a data module."""
    option = f"--data.repo_id {data.repo_id}"
    load = partial(load_hub_split, data.repo_id, data.subset, option=option)
    train, val = load(data.split), None if data.val_split is None else [load(data.val_split)]
    return option, Splits([train], val)


def find_file_splits(data: Any, name: str, kinds: dict[str, str] = KINDS) -> tuple[str, Splits]:
    """Return the option ``--data.<name>`` of a data module and the rows of its file or folder."""
    flag, path = f"--data.{name}", getattr(data, name)
    return f"{flag} {path}", find_splits(path, flag, kinds)


@dataclass
class HuggingFace(InstructionData):
    """A dataset from the Hugging Face hub, loaded with the datasets library. Rows with an empty answer are skipped.

    Args:
        repo_id: Dataset name, such as tatsu-lab/alpaca, or a local dataset folder.
        subset: Dataset configuration (subset) name.
        split: Training split, such as train or train[:1000].
        val_split: Validation split; by default, a fraction of training rows is held out.
    """

    repo_id: str
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None

    def find_rows(self) -> tuple[str, Splits]:
        return find_hub_splits(self)


@dataclass
class _NamedDataset(_Files):
    """A published hub dataset.

    Args:
        local_path: Local file or folder with this dataset, instead of the hub.
    """

    local_path: str | None = None

    repo_id: ClassVar[str]
    n_rows: ClassVar[int]
    path_option = "local_path"
    kinds = KINDS

    def estimate_rows(self, tokenizer: Tokenizer | None, max_seq_length: int) -> int | None:
        """See :meth:`DataModule.estimate_rows`."""
        if self.local_path is not None or self.packing != "none" or self.on_long in ("drop", "split"):
            return None
        return round((1 - held_out_fraction(self.val_split_fraction, None)) * self.n_rows)

    def find_rows(self) -> tuple[str, Splits]:
        if self.local_path is not None:
            return super().find_rows()
        option = f"--data {type(self).__name__}"
        return option, Splits([load_hub_split(self.repo_id, None, "train", option)])


class Alpaca(_NamedDataset):
    """Stanford's 52,002 instructions with answers from text-davinci-003 (tatsu-lab/alpaca; CC BY-NC 4.0)."""

    repo_id, n_rows = "tatsu-lab/alpaca", 52_002


class Alpaca2k(_NamedDataset):
    """2,000 rows of Alpaca for quick experiments (mhenrichsen/alpaca_2k_test)."""

    repo_id, n_rows = "mhenrichsen/alpaca_2k_test", 2_000


class AlpacaGPT4(_NamedDataset):
    """Alpaca's instructions with answers from GPT-4 (vicgalle/alpaca-gpt4; CC BY-NC 4.0)."""

    repo_id, n_rows = "vicgalle/alpaca-gpt4", 52_002


class Dolly(_NamedDataset):
    """15,011 instructions with human-written contexts and answers (databricks/databricks-dolly-15k; CC BY-SA 3.0)."""

    repo_id, n_rows = "databricks/databricks-dolly-15k", 15_011


class LIMA(_NamedDataset):
    """1,030 curated conversations (GAIR/lima; accept its license on the hub first)."""

    repo_id, n_rows = "GAIR/lima", 1_030
