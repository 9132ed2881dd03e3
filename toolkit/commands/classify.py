"""`toolkit classify`: labels or scores of texts, from a model with a classification or reward head."""

import csv
import json
import math
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from toolkit.config import Accelerator
from toolkit.data.sft.labels import MULTI, SINGLE, Labeling
from toolkit.data.sft.readers import KINDS, RowFile, describe_row, find_splits
from toolkit.data.sft.schemas import to_record
from toolkit.errors import UserError, require_option

PREDICTION = "prediction"


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

    The added columns are prediction and, for a classification, score_LABEL, the probability of each label.

    Args:
        checkpoint_dir: A checkpoint folder of a model with a head, or a name below checkpoints/; adapters are loaded
            unmerged.
        texts: A .csv, .json, .jsonl or .parquet file; "-" reads CSV from stdin. Longer texts are cut at the end.
        text_column: Column of the text; by default text, messages or conversations. For a reward model, rows may also
            have a prompt with its completion.
        text_pair_column: Column of a second text, which follows the first after a line break.
        batch_size: Texts per forward pass.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: Dtype of weights and computation. Default: bf16-true on CUDA, else the checkpoint's.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    source: Any = RowFile(Path("/dev/stdin"), "csv", "--texts -")
    if texts != "-":
        path, kind = Path(texts), KINDS.get(Path(texts).suffix.lower())
        require_option(path.is_file(), "texts", texts, "no such file")
        require_option(kind is not None, "texts", texts, f"must end in {', '.join(KINDS)}")
        (source,) = find_splits(texts, "texts", KINDS).train
    from toolkit.inference.load import load_checkpoint

    loaded = load_checkpoint(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        accelerator=accelerator,
        precision=precision,
        verify_checkpoint=verify_checkpoint,
        takes_head=True,
    )
    config = loaded.model.config
    if config.head is None:
        raise UserError(f"checkpoint_dir {checkpoint_dir}: has no head; train one with toolkit finetune_full --head")
    labeling = Labeling(text_column, text_pair_column)
    writer, n_cut = None, 0
    all_rows = source.rows()
    while rows := list(islice(all_rows, batch_size)):
        ids, cut = zip(*(encode(loaded, labeling, row, describe_row(source, i)) for i, row in rows), strict=True)
        n_cut += sum(cut)
        for (_, row), scores in zip(rows, score(loaded.model, ids, loaded.tokenizer.pad_id), strict=True):
            values = row | describe(config, scores)
            if writer is None:
                writer = csv.DictWriter(sys.stdout, list(values), restval="", extrasaction="ignore")
                writer.writeheader()
            writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in values.items()})
    if n_cut:
        print(f"{n_cut:,} texts cut to {config.block_size:,} tokens, the model's context length", file=sys.stderr)


def encode(loaded: Any, labeling: Labeling, row: Any, where: str) -> tuple[list[int], bool]:
    """Return the tokens of a row, as in training, and whether they are cut."""
    from toolkit.data.sft.tokenize import tokenize_record
    from toolkit.inference.chat import find_template

    is_text = loaded.model.config.head == "classification" or labeling.text_column is not None
    record = labeling.parse(row, where, needs_label=False) if is_text else to_record(row, where)
    template, no_template = None, None
    try:
        template = find_template(loaded.tokenizer)
    except UserError as error:
        no_template = error
    options: Any = SimpleNamespace(
        tokenizer=loaded.tokenizer, template=template, no_template=no_template, train_on="all"
    )
    ids, limit = tokenize_record(record, options).ids, loaded.model.config.block_size
    return ids[:limit], len(ids) > limit


def score(model: Any, texts: Sequence[list[int]], pad: int | None) -> list[list[float]]:
    """Return the scores of each text."""
    import torch

    from toolkit.data.batch import NO_ROUNDING, collate
    from toolkit.data.sft.tokenize import mark_last
    from toolkit.objectives.scores import score_last_tokens

    marked = [mark_last(ids, pad).ids for ids in texts]
    rows = [{"input_ids": torch.tensor(ids[:-1]), "labels": torch.full((len(ids) - 1,), -100)} for ids in marked]
    for row in rows:
        row["labels"][-1] = 0
    batch = collate([*rows], [*range(len(rows))], [], 0, NO_ROUNDING)
    with torch.no_grad():
        return score_last_tokens(model, batch, next(model.parameters()).device)[0].tolist()


def describe(config: Any, scores: list[float]) -> dict[str, Any]:
    """Return the columns to add to a row."""
    if config.problem_type not in (SINGLE, MULTI):
        return {PREDICTION: scores[0]}
    if config.problem_type == MULTI:
        shares = [1 / (1 + math.exp(-score)) for score in scores]
        prediction: Any = [label for label, share in zip(config.labels, shares, strict=True) if share > 0.5]
    else:
        powers = [math.exp(score - max(scores)) for score in scores]
        shares = [power / sum(powers) for power in powers]
        prediction = config.labels[shares.index(max(shares))]
    columns = {f"score_{label}": share for label, share in zip(config.labels, shares, strict=True)}
    return {PREDICTION: prediction} | columns
