"""`toolkit classify`: labels or scores of texts, from a model with a classification or reward head."""

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from jsonargparse.typing import PositiveInt

from toolkit.config import Accelerator
from toolkit.data.sft.labels import MULTI, SINGLE, Labeling
from toolkit.data.sft.readers import KINDS, RowFile, describe_row, find_splits
from toolkit.data.sft.schemas import to_record
from toolkit.errors import UserError, require_option


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
    if texts == "-":
        source: Any = RowFile(Path("/dev/stdin"), "csv", "--texts -")
    else:
        require_option(Path(texts).is_file(), "texts", texts, "no such file")
        (source,) = find_splits(texts, "--texts", KINDS).train
    from toolkit.data.chat.template import Encoding, tokenizer_template
    from toolkit.data.sft.tokenize import mark_scored, tokenize_record
    from toolkit.inference.chat import find_template
    from toolkit.inference.load import load_checkpoint

    loaded = load_checkpoint(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        accelerator=accelerator,
        precision=precision,
        verify_checkpoint=verify_checkpoint,
        takes_head=True,
    )
    config, tokenizer = loaded.model.config, loaded.tokenizer
    if config.head is None:
        raise UserError(f"checkpoint_dir {checkpoint_dir}: has no head; train one with toolkit finetune_full --head")
    labeling = Labeling(text_column, text_pair_column)
    is_reward = config.head != "classification" and text_column is None
    of_tokens, limit = config.head == "token_reward", config.block_size
    options: Any = SimpleNamespace(
        tokenizer=tokenizer,
        template=find_template(tokenizer) if tokenizer_template(tokenizer) is not None else None,
        no_template=UserError(f"checkpoint_dir {checkpoint_dir}: has no chat template for messages; give texts"),
        train_on="last_answer" if of_tokens else "all",
    )
    rows, encodings, n_cut = [], [], 0
    for number, row in source.rows():  # check all before the first is printed
        where = describe_row(source, number)
        try:
            record = to_record(row, where) if is_reward else labeling.parse(row, where, needs_label=False)
        except UserError as error:
            reason, _, fix = str(error).partition("; ")
            if "--" in fix:  # an option of training
                fix = "give a text, messages, or a prompt with its completion; see --text_column"
            raise UserError(f"{reason}; {fix}") from error
        ids, loss_mask = tokenize_record(record, options)
        rows.append(row)
        encodings.append(mark_scored(Encoding(ids[:limit], loss_mask[:limit]), tokenizer.pad_id, of_tokens))
        n_cut += len(ids) > limit
    columns = list(dict.fromkeys(name for row in rows for name in row))
    labels: Any = config.labels if config.problem_type in (SINGLE, MULTI) else []
    added = ["prediction", *["token_rewards"] * of_tokens, *(f"score_{label}" for label in labels)]
    if repeated := {*columns} & {*added}:
        raise UserError(f"--texts {texts}: has a column {min(repeated)}, which classify adds; rename it")
    writer = csv.writer(sys.stdout)
    writer.writerow([*columns, *added])
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        for row, predictions in zip(rows[part], predict(loaded.model, encodings[part]), strict=True):
            cells = [*map(row.get, columns), *predictions]
            writer.writerow([json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in cells])
    if n_cut:
        print(f"{n_cut:,} texts cut to {limit:,} tokens, the model's context length", file=sys.stderr)


def predict(model: Any, encodings: list[Any]) -> list[list[Any]]:
    """Return what to add to the row of each text: the prediction, and probabilities or rewards.

    ``encodings``: of :func:`toolkit.data.sft.tokenize.mark_scored`.
    """
    import torch

    from toolkit.data.batch import batch_texts
    from toolkit.objectives.scores import read_scores

    with torch.no_grad():
        scores, row_of_score, _ = read_scores(model, batch_texts(encodings), next(model.parameters()).device)
    if model.config.head == "token_reward":
        by_row = scores[:, 0].split(row_of_score.bincount(minlength=len(encodings)).tolist())
        return [[rewards.mean().item(), rewards.tolist()] for rewards in by_row]
    labels, kind = model.config.labels, model.config.problem_type
    if kind == SINGLE:
        return [[labels[shares.index(max(shares))], *shares] for shares in scores.softmax(1).tolist()]
    if kind == MULTI:
        of_texts = scores.sigmoid().tolist()
        return [[[labels[i] for i, share in enumerate(shares) if share > 0.5], *shares] for shares in of_texts]
    return scores[:, :1].tolist()
