"""Instruction data: user-provided files, Hugging Face datasets, and well-known datasets by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from toolkit.data.sft.instruct import InstructionData
from toolkit.data.sft.readers import CSV_KINDS, JSON_KINDS, KINDS, PARQUET_KINDS, Splits, find_splits, load_hub_split


@dataclass
class _Files(InstructionData):
    """Rows of a file, or of a folder with one file per split."""

    path_option: ClassVar[str]
    kinds: ClassVar[dict[str, str]]

    def find_rows(self) -> tuple[str, Splits]:
        path = getattr(self, self.path_option)
        return f"--data.{self.path_option} {path}", find_splits(path, self.path_option, self.kinds)


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


@dataclass
class HuggingFace(InstructionData):
    """A dataset from the Hugging Face hub, loaded with the datasets library. Rows with an empty answer are skipped.

    Args:
        repo_id: Dataset name, such as tatsu-lab/alpaca, or a local dataset folder.
        subset: Dataset configuration (subset) name.
        split: Training split, such as train or train[:1000].
        val_split: Validation split; by default a share of the training rows is held out.
    """

    repo_id: str
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None

    skips_empty_answers: ClassVar[bool] = True

    def find_rows(self) -> tuple[str, Splits]:
        option = f"--data.repo_id {self.repo_id}"
        train = load_hub_split(self.repo_id, self.subset, self.split, option)
        if self.val_split is None:
            return option, Splits([train])
        return option, Splits([train], [load_hub_split(self.repo_id, self.subset, self.val_split, option)])


@dataclass
class _NamedDataset(_Files):
    """A hub dataset under its own name.

    Args:
        local_path: Local file or folder with this dataset, instead of the hub.
    """

    local_path: str | None = None

    repo_id: ClassVar[str]
    path_option = "local_path"
    kinds = KINDS
    skips_empty_answers: ClassVar[bool] = True

    def find_rows(self) -> tuple[str, Splits]:
        if self.local_path is not None:
            return super().find_rows()
        option = f"--data {type(self).__name__}"
        return option, Splits([load_hub_split(self.repo_id, None, "train", option)])


@dataclass
class Alpaca(_NamedDataset):
    """Stanford's 52,002 instructions with answers from text-davinci-003 (tatsu-lab/alpaca; CC BY-NC 4.0)."""

    repo_id = "tatsu-lab/alpaca"


@dataclass
class Alpaca2k(_NamedDataset):
    """2,000 rows of Alpaca for quick experiments (mhenrichsen/alpaca_2k_test)."""

    repo_id = "mhenrichsen/alpaca_2k_test"


@dataclass
class AlpacaGPT4(_NamedDataset):
    """Alpaca's instructions with answers from GPT-4 (vicgalle/alpaca-gpt4; CC BY-NC 4.0)."""

    repo_id = "vicgalle/alpaca-gpt4"


@dataclass
class Dolly(_NamedDataset):
    """15,011 instructions with human-written contexts and answers (databricks/databricks-dolly-15k; CC BY-SA 3.0)."""

    repo_id = "databricks/databricks-dolly-15k"


@dataclass
class LIMA(_NamedDataset):
    """1,030 curated conversations (GAIR/lima; accept its license on the hub first)."""

    repo_id = "GAIR/lima"
