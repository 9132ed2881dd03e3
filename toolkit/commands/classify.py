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
from toolkit.models.labels import IGNORE_INDEX


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
        (source,) = find_splits(texts, "texts", KINDS).train
    from toolkit.data.chat.template import tokenizer_template
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
    config = loaded.model.config
    if config.head is None:
        raise UserError(f"checkpoint_dir {checkpoint_dir}: has no head; train one with toolkit finetune_full --head")
    labeling = Labeling(text_column, text_pair_column)
    is_reward = config.head != "classification" and text_column is None
    has_template = tokenizer_template(loaded.tokenizer) is not None
    template = find_template(loaded.tokenizer) if has_template else None
    no_template = UserError(f"checkpoint_dir {checkpoint_dir}: has no chat template for messages; give texts")
    train_on = "last_answer" if config.head == "token_reward" else "all"
    options = SimpleNamespace(tokenizer=loaded.tokenizer, template=template, no_template=no_template, train_on=train_on)
    rows, records = [], []
    for number, row in source.rows():  # check all before the first is printed
        where = describe_row(source, number)
        try:
            records.append(to_record(row, where) if is_reward else labeling.parse(row, where, needs_label=False))
        except UserError as error:
            raise UserError(str(error).replace("--data.text", "--text")) from error
        rows.append(row)
    columns, writer, n_cut = list(dict.fromkeys(name for row in rows for name in row)), None, 0
    for start in range(0, len(rows), batch_size):
        part = slice(start, start + batch_size)
        predictions, cut = predict(loaded, records[part], options)
        n_cut += cut
        for row, prediction in zip(rows[part], predictions, strict=True):
            if writer is None:
                if repeated := {*columns} & prediction.keys():
                    raise UserError(f"--texts {texts}: has a column {min(repeated)}, which classify adds; rename it")
                writer = csv.DictWriter(sys.stdout, [*columns, *prediction])
                writer.writeheader()
            values = (row | prediction).items()
            writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in values})
    if n_cut:
        print(f"{n_cut:,} texts cut to {config.block_size:,} tokens, the model's context length", file=sys.stderr)


def predict(loaded: Any, records: list[Any], options: Any) -> tuple[list[dict[str, Any]], int]:
    """Return the columns to add to each row, and the number of texts that are longer than the model's context.

    ``options``: tokenizer and template, as in :class:`toolkit.data.sft.tokenize.SFTConfig`.
    """
    import torch

    from toolkit.data.batch import NO_ROUNDING, collate
    from toolkit.data.chat.template import Encoding
    from toolkit.data.sft.tokenize import mark_scored, tokenize_record
    from toolkit.objectives.scores import read_scores

    model, tokenizer = loaded.model, loaded.tokenizer
    texts, limit, rows = [tokenize_record(record, options) for record in records], model.config.block_size, []
    of_tokens = model.config.head == "token_reward"
    for ids, loss_mask in texts:
        encoding = Encoding(ids[:limit], loss_mask[:limit])
        tokens, mask = map(torch.tensor, mark_scored(encoding, tokenizer.pad_id, of_tokens))
        rows.append({"input_ids": tokens[:-1], "labels": torch.where(mask, tokens, IGNORE_INDEX)[1:]})
    batch = collate([*rows], [*range(len(rows))], [], 0, NO_ROUNDING)
    with torch.no_grad():
        scores, row_of_score, _ = read_scores(model, batch, next(model.parameters()).device)
    kind, labels = model.config.problem_type, model.config.labels
    if of_tokens:
        by_row = scores[:, 0].split(row_of_score.bincount(minlength=len(rows)).tolist())
        columns = [{"prediction": rewards.mean().item(), "token_rewards": rewards.tolist()} for rewards in by_row]
    elif kind not in (SINGLE, MULTI):
        columns = [{"prediction": score} for score in scores[:, 0].tolist()]
    else:
        columns = []
        for shares in (scores.softmax(1) if kind == SINGLE else scores.sigmoid()).tolist():
            several = [label for label, share in zip(labels, shares, strict=True) if share > 0.5]
            prediction = several if kind == MULTI else labels[shares.index(max(shares))]
            columns.append({"prediction": prediction} | {f"score_{k}": v for k, v in zip(labels, shares, strict=True)})
    return columns, sum(len(ids) > limit for ids, _ in texts)
