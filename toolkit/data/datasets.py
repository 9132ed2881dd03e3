"""Instruction data of one's own in files, from the Hugging Face hub, and well-known sets by their name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from toolkit.data.instruct import InstructionData

if TYPE_CHECKING:
    from toolkit.data.readers import Splits


@dataclass
class JSON(InstructionData):
    """Rows of a JSON or JSON lines file.

    Args:
        json_path: A .jsonl with a row per line; a .json with a list of rows or {"train": [...], "val": [...]}; or a
            folder with train.json[l] and, if there is one, val.json[l] (also validation or test).
    """

    json_path: str

    def find_rows(self) -> tuple[str, Splits]:
        from toolkit.data.readers import JSON_KINDS, find_splits

        return f"--data.json_path {self.json_path}", find_splits(self.json_path, "json_path", JSON_KINDS)


@dataclass
class CSV(InstructionData):
    """Rows of a CSV file whose first line names the columns.

    Args:
        csv_path: The file, or a folder with train.csv and, if there is one, val.csv (also validation or test).
    """

    csv_path: str

    def find_rows(self) -> tuple[str, Splits]:
        from toolkit.data.readers import CSV_KINDS, find_splits

        return f"--data.csv_path {self.csv_path}", find_splits(self.csv_path, "csv_path", CSV_KINDS)


@dataclass
class Parquet(InstructionData):
    """Rows of a Parquet file.

    Args:
        parquet_path: The file, or a folder with train.parquet (or train-*.parquet) and, if there is one, val.parquet
            (also validation or test).
    """

    parquet_path: str

    def find_rows(self) -> tuple[str, Splits]:
        from toolkit.data.readers import PARQUET_KINDS, find_splits

        splits = find_splits(self.parquet_path, "parquet_path", PARQUET_KINDS)
        return f"--data.parquet_path {self.parquet_path}", splits


@dataclass
class HuggingFace(InstructionData):
    """A data set of the Hugging Face hub, through the datasets library. Rows with an empty answer are left out.

    Args:
        repo_id: Its name, such as tatsu-lab/alpaca, or a local folder with such a data set.
        subset: One of its configurations.
        split: The training rows, such as train or train[:1000].
        val_split: The held-out rows; a share of the training rows when not given.
    """

    repo_id: str
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None

    skips_empty_answers: ClassVar[bool] = True

    def find_rows(self) -> tuple[str, Splits]:
        from toolkit.data.readers import Splits, load_hub_split

        option = f"--data.repo_id {self.repo_id}"
        train = load_hub_split(self.repo_id, self.subset, self.split, option)
        if self.val_split is None:
            return option, Splits([train])
        return option, Splits([train], [load_hub_split(self.repo_id, self.subset, self.val_split, option)])


@dataclass
class _NamedSet(InstructionData):
    """A set of the hub under its own name."""

    local_path: str | None = None

    repo_id: ClassVar[str]
    skips_empty_answers: ClassVar[bool] = True

    def find_rows(self) -> tuple[str, Splits]:
        from toolkit.data.readers import KINDS, Splits, find_splits, load_hub_split

        if self.local_path is not None:
            return f"--data.local_path {self.local_path}", find_splits(self.local_path, "local_path", KINDS)
        option = f"--data {type(self).__name__}"
        return option, Splits([load_hub_split(self.repo_id, None, "train", option)])


@dataclass
class Alpaca(_NamedSet):
    """Stanford's 52,002 instructions with answers of text-davinci-003 (tatsu-lab/alpaca; CC BY-NC 4.0).

    Args:
        local_path: A file or folder with these rows, instead of the hub.
    """

    repo_id = "tatsu-lab/alpaca"


@dataclass
class Alpaca2k(_NamedSet):
    """2,000 rows of Alpaca, for trying things out (mhenrichsen/alpaca_2k_test).

    Args:
        local_path: A file or folder with these rows, instead of the hub.
    """

    repo_id = "mhenrichsen/alpaca_2k_test"


@dataclass
class AlpacaGPT4(_NamedSet):
    """Alpaca's instructions with answers of GPT-4 (vicgalle/alpaca-gpt4; CC BY-NC 4.0).

    Args:
        local_path: A file or folder with these rows, instead of the hub.
    """

    repo_id = "vicgalle/alpaca-gpt4"


@dataclass
class Dolly(_NamedSet):
    """15,011 instructions with contexts and answers by people (databricks/databricks-dolly-15k; CC BY-SA 3.0).

    Args:
        local_path: A file or folder with these rows, instead of the hub.
    """

    repo_id = "databricks/databricks-dolly-15k"


@dataclass
class LIMA(_NamedSet):
    """1,030 carefully chosen conversations (GAIR/lima; its licence must be accepted on the hub).

    Args:
        local_path: A file or folder with these rows, instead of the hub.
    """

    repo_id = "GAIR/lima"
