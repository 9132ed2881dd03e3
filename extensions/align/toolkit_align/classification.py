"""The data module of a classification: texts with labels."""

from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from toolkit.checkpoints.find import HYPERPARAMETERS, read_settings
from toolkit.data.base import (
    Content,
    DataModule,
    LabelSet,
    OnLong,
    Packing,
    PreparedData,
    Report,
    RowKind,
    require,
    require_one,
    require_val_fraction,
)
from toolkit.data.sft.datasets import find_file_splits, find_hub_splits, prepare_rows
from toolkit.data.sft.first_rows import MAX_ROWS, first_records
from toolkit.data.sft.readers import Splits
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, notice
from toolkit.models.config_checks import ProblemType
from toolkit_align.labels import ClassWeights, Labeling


@dataclass(kw_only=True)
class Classification(DataModule):
    """Texts with labels, for --head classification. A text is a string or a list of messages.

    Args:
        path: A .json, .jsonl, .csv or .parquet file, or a folder with a file per split, as in --data JSON.
        repo_id: Instead of a file: a dataset on the Hugging Face hub. Rows with an empty text are skipped.
        subset: Dataset configuration (subset) name.
        split: Training split, such as train or train[:1000].
        val_split: Validation split; by default, a fraction of training rows is held out.
        text_column: Column of the text; by default text, messages or conversations.
        text_pair_column: Column of a second text, which follows the first after a line break.
        label_column: Column of the label; by default label. toolkit evaluate takes columns that are not given from the
            model's training run; "" is none.
        problem_type: Kind of the labels. Default: lists of names, or of 0 or 1 for each class, are several labels per
            text, numbers with a fraction, or lists of them, are regression, and all others are one label per text.
        class_weights: Weight of each label in the loss, such as '{"spam": 5}'; "balanced": inverse to its frequency.
        val_split_fraction: Fraction of samples held out for validation; 0 for none. Default 0.05, unless there is a
            validation file.
        prompt_style: Chat template of messages: chatml, llama3, ...; by default, the checkpoint's.
        chat_template: Jinja file with a custom chat template, which is saved with the model.
        on_long: What to do with texts longer than a row: truncate the end, drop the text, or raise an error.
        packing: "best_fit" packs several texts into each row, without attention between them.
        cache_dir: Cache folder for prepared data; ~/.cache/toolkit/data by default.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    path: str | None = None
    repo_id: str | None = None
    subset: str | None = None
    split: str = "train"
    val_split: str | None = None
    text_column: str | None = None
    text_pair_column: str | None = None
    label_column: str | None = None
    problem_type: ProblemType | None = None
    class_weights: ClassWeights = None
    val_split_fraction: float | None = None
    prompt_style: str | None = None
    chat_template: str | None = None
    on_long: OnLong = "truncate"
    packing: Packing = "none"
    cache_dir: str | None = None
    num_workers: int = 0

    content: ClassVar[Content] = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_val_fraction(self, "val_split_fraction")
        require_one(self, "chat_template", "prompt_style")
        require_one(self, "path", "repo_id")
        require(self.on_long != "split", "on_long", self.on_long, "a part has no label; use truncate, drop or error")
        weights = self.class_weights if isinstance(self.class_weights, dict) else {}
        for label, weight in weights.items():
            require(weight > 0, f"class_weights.{label}", weight, "must be greater than zero")

    def check_first_rows(self, kind: RowKind, model_labels: LabelSet | None) -> None:
        labeling = self.labeling(model_labels)
        files, records = first_records(self, labeling.parse)
        if files and len(records) < MAX_ROWS:
            import numpy as np  # not needed for other data

            is_any = np.ones(len(records), np.bool_)
            labeling.encode(records, is_any, is_any, files[0].class_names().get(labeling.label_column))

    def as_trained(self, folder: Path) -> "Classification":
        columns = {name: getattr(self, name) for name in ("text_column", "text_pair_column", "label_column")}
        return replace(self, **with_run_columns(folder, columns))

    def find_rows(self) -> tuple[str, Splits]:
        """Return the data option, such as ``--data.path reviews.csv``, and the row sources."""
        return find_hub_splits(self) if self.repo_id else find_file_splits(self, "path")

    def labeling(self, labels: LabelSet | None) -> Labeling:
        """Return how to read rows. ``labels``: The model's; None takes the data's."""
        options = {f.name: getattr(self, f.name) for f in fields(Labeling) if f.name != "model_labels"}
        return Labeling(**options | {"label_column": self.label_column or "label"}, model_labels=labels)

    def prepare(
        self,
        *,
        tokenizer: Tokenizer | None,
        max_seq_length: int,
        report: Report = print,
        kind: RowKind = "labeled",
        labels: LabelSet | None = None,
    ) -> PreparedData:
        """See :meth:`DataModule.prepare`. ``labels``: The model's; None takes the data's."""
        if kind != "labeled":
            raise UserError("--data Classification: needs --head classification")
        data = prepare_rows(self, tokenizer, max_seq_length, report, kind=kind, labeling=self.labeling(labels))
        for name in ("prompt_style", "chat_template"):
            value, train = getattr(self, name), cast("Any", data.train)
            has_effect = value is None or train.statistics["conversations"]
            require(has_effect, name, value, "has no effect on texts, only on messages; remove it")
        return data


def with_run_columns(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return options such as text_column, with those that are None as in the classification that trained a checkpoint.

    Says so in a line on stderr.
    """
    columns: dict[str, str] = {}
    with suppress(KeyError, TypeError, AttributeError):  # a file that toolkit did not write
        data = read_settings(folder, HYPERPARAMETERS)["data"]
        if data["class_path"] == "Classification":
            values = {name: data["init_args"].get(name) for name, value in options.items() if value is None}
            columns = {name: str(value) for name, value in values.items() if value}
    if columns:
        notice(f"columns as in the checkpoint's run: {', '.join(f'{name} {value}' for name, value in columns.items())}")
    return options | columns
