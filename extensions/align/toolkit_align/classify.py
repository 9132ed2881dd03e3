"""`toolkit classify`: labels or scores of texts, from a model with a classification or reward head."""

import json
import sys
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from toolkit.checkpoints.find import find_checkpoint_dir, head_of
from toolkit.config import Accelerator
from toolkit.data.sft.readers import KINDS, RowFile, describe_row, find_splits
from toolkit.data.sft.schemas import parse_row
from toolkit.errors import UserError, join_first, notice, require_option
from toolkit.escape import csv_writer, visible
from toolkit_align.classification import with_run_columns
from toolkit_align.labels import MULTI, SINGLE


def setup(
    checkpoint_dir: str,
    texts: str,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    batch_size: PositiveInt = 8,
    base_checkpoint_dir: str | None = None,
    accelerator: Accelerator = "auto",
    precision: Literal["32-true", "bf16-true"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Print each row of a file as CSV, with the prediction of a model with a head.

    The columns are the rows', then prediction and, for a classification, score_LABEL, the probability of each label, or
    for a reward of each token, token_rewards.

    Args:
        checkpoint_dir: A checkpoint folder of a model with a head, or a name below checkpoints/; adapters are loaded
            unmerged.
        texts: A .csv, .json, .jsonl or .parquet file; "-" reads CSV from stdin. Longer texts are cut at the end, for a
            reward the prompt from the left.
        text_column: Column of the text; by default the training run's, then text, messages or conversations. For a
            reward model, rows may also have a prompt with its completion.
        text_pair_column: Column of a second text, which follows the first after a line break; by default the training
            run's, "" for none.
        batch_size: Texts per forward pass.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: 32-true on a CPU, bf16-true on CUDA, else the
            checkpoint's.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    if texts == "-":
        source: Any = RowFile(Path("/dev/stdin"), "csv", "--texts -")
    else:
        reason = "no such file; --texts - reads texts from stdin, as CSV"
        reason = "is a folder; give one of its files" if Path(texts).is_dir() else reason
        require_option(Path(texts).is_file(), "texts", texts, reason)
        (source,) = find_splits(texts, "--texts", KINDS).train
    folder = find_checkpoint_dir(checkpoint_dir)
    options = with_run_columns(folder, {"text_column": text_column, "text_pair_column": text_pair_column})
    kind: Any = "answers" if text_column is None and str(head_of(folder)).endswith("reward") else "unlabeled"
    mapped = {name.removesuffix("_column"): column for name, column in options.items() if column}
    rows, records = [], []
    for number, row in source.rows():  # check all before PyTorch is imported
        try:
            records += parse_row(row, describe_row(source, number), mapped, kind)
        except UserError as error:
            reason, _, fix = str(error).rpartition("; ")
            if "--data" not in fix:
                raise
            fix = "give a text, messages, or a prompt with its completion; see --text_column"
            raise UserError(f"{reason}; {fix}") from error
        rows.append(row)
    from toolkit_align.text_scorer import TextScorer

    scorer = TextScorer(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        accelerator=accelerator,
        precision=precision,
        verify_checkpoint=verify_checkpoint,
    )
    config, encodings = scorer.config, list(map(scorer.encode, records))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    labels: Any = config.labels if config.problem_type in (SINGLE, MULTI) else []
    added = [
        "prediction",
        *["token_rewards"] * (config.head == "token_reward"),
        *(f"score_{visible(label)}" for label in labels),
    ]
    if repeated := {*columns} & {*added}:
        raise UserError(f"--texts {texts}: has a column {min(repeated)}, which classify adds; rename it")
    if unread := {name for record in records for name in record.unread}:
        notice(f"not read: {join_first(sorted(unread), 20)}")
    writer = csv_writer(sys.stdout)
    writer.writerow([*columns, *added])
    for values, predictions in zip(rows, scorer.predict(encodings, batch_size), strict=True):
        added = [visible(cell) if isinstance(cell, str) else cell for cell in predictions]  # a label of the model
        cells = [*map(values.get, columns), *added]
        writer.writerow([json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells])
    if scorer.n_cut:
        notice(f"{scorer.n_cut:,} texts cut to {config.block_size:,} tokens, the model's context length")
