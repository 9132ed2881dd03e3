"""Prepare the data of a run, with its tokenizer and vocabulary size."""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.store import newest_first
from toolkit.data.base import (
    LabelSet,
    PreparedData,
    Report,
    TokenDataset,
    epoch_rows,
    mean_length,
    row_count,
    rows_of,
)
from toolkit.data.interleave import ConcatenatedRows
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.rows import PythonData, check_rows
from toolkit.data.tokens.store import BlockDataset
from toolkit.data.tokens.synthetic import SyntheticRows
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.objectives import Objective
from toolkit.planning.own_tokenizer import download_hint, own_repository
from toolkit.planning.resolve import ResolvedConfig, has_limit, with_model_limit
from toolkit.planning.run_args import RunArgs
from toolkit.training.checkpoint_meta import read_meta


def prepare_data(args: RunArgs, seq_length: int | None, report: Report) -> PreparedData:
    """Prepare the data with the tokenizer of --tokenizer_dir, else of the initial checkpoint, else of the data."""
    tokenizer, is_tokens = None, isinstance(args.data, PythonData)
    if args.tokenizer_dir is not None:
        tokenizer = Tokenizer.load(args.tokenizer_dir)
    elif args.base_dir is not None and not (is_tokens and not (args.base_dir / "tokenizer.json").is_file()):
        tokenizer = Tokenizer.load(args.base_dir, "checkpoint_dir")
    if (repository := own_repository(args)) is not None:
        report(f"note: training a new tokenizer on the data; {download_hint(repository)}")
    elif args.tokenizer_dir != getattr(args.requested, "tokenizer_dir", args.tokenizer_dir):
        report(f"Tokenizer: {args.tokenizer_dir}")
    model = None if args.objective.head is None or args.base_dir is None else read_model_config(args.base_dir)
    of_rows = row_options(args.objective, model)
    data = args.data.prepare(tokenizer=tokenizer, max_seq_length=seq_length or 0, report=report, **of_rows)
    if not type(args.data).__module__.startswith("toolkit."):
        check_rows(f"--data {type(args.data).__name__}", data, seq_length)
    count, batch_size = row_count(data.train), args.train.global_batch_size
    if count is not None and count < batch_size:
        rows = "samples" if seq_length is None else f"rows of at most {seq_length} tokens"
        raise UserError(
            f"--train.global_batch_size {batch_size}: the training data has only {count} {rows}; add data, or lower it "
            "or --train.max_seq_length"
        )
    return data


def row_options(objective: Objective, model: ModelConfig | None) -> dict[str, Any]:
    """Return the options of ``DataModule.prepare`` that tell what a row is, and the labels of a model with a head."""
    if objective.row_kind == "answers":
        return {}  # only instruction data has these options, see the table of options
    options: dict[str, Any] = {"kind": objective.row_kind}
    if model is not None and model.labels is not None and model.problem_type is not None:
        options["labels"] = LabelSet(model.labels, model.problem_type)
    return options


def uses_old_ends(resume_from: Path | None) -> bool:
    """Whether the run to resume began with a version whose text for pretraining has no bos."""
    for folder in [] if resume_from is None else [resume_from, *newest_first(resume_from.parent)]:
        with suppress(UserError):  # a damaged checkpoint is reported later, and an older one may be used
            return not read_meta(folder).get("document_ends")
    return False


def with_length(config: ResolvedConfig, data: PreparedData, report: Report) -> ResolvedConfig:
    """Set the limits of a named architecture that has none, and report them."""
    if has_limit(config.args.train):
        return config
    model = with_vocabulary(config.model, data)
    assert model is not None, "named"
    args, length = with_model_limit(config.args, model, mean_length(data.train) * (epoch_rows(data.train) or math.inf))
    report(f"Length: {length}; the lines of steps show the time left")
    return replace(config, args=args)


def with_vocabulary(config: ModelConfig | None, data: PreparedData) -> ModelConfig | None:
    """Set the vocabulary size, if the config has none, from the tokenizer or the pre-tokenized data; and the labels.

    A tokenizer may have tokens without an embedding (Gemma 3 has one for images) if the data does not use them. Only
    then is all data read to check.
    """
    if config is None:
        return None
    if data.labels is not None:
        config = replace(config, labels=data.labels.names, problem_type=data.labels.problem_type)
    sizes = (None if data.tokenizer is None else data.tokenizer.vocab_size, data.vocab_size)
    vocab_sizes = [size for size in sizes if size is not None]
    config = config.with_vocab_size(max(vocab_sizes, default=None))
    embedded = config.padded_vocab_size
    if not vocab_sizes or max(vocab_sizes) <= embedded:
        return config
    if data.vocab_size is not None:  # known for pre-tokenized data
        largest = data.vocab_size - 1
    elif row_count(data.train) is None:  # the data is not read completely before the run
        largest = max(vocab_sizes) - 1
    else:
        largest = max(_largest_token(rows) for rows in (data.train, data.val) if rows is not None)
    if largest >= embedded:
        source = f"--tokenizer_dir: has {max(vocab_sizes)} tokens and the data"
        source, fix = "--data:" if data.tokenizer is None else source, "use the model's own tokenizer"
        if isinstance(data.train, SyntheticRows):
            source, fix = f"--data.vocab_size {data.vocab_size}: the data", f"use at most {embedded}"
        raise UserError(
            f"{source} has token ids up to {largest}, but the model embeds only 0 to {embedded - 1}; {fix}, or "
            f"pretrain a model with --model_config.vocab_size {max(vocab_sizes)}"
        )
    return config


def _largest_token(rows: TokenDataset) -> int:
    if isinstance(rows, ConcatenatedRows):
        return max(map(_largest_token, rows.datasets))
    if isinstance(rows, BlockDataset):
        return rows.store.array.survey()[1]
    return max(
        int(torch.as_tensor(row[name]).max())
        for i in range(len(rows))
        for row in rows_of(rows[i])
        for name in ("input_ids", "labels")
    )
