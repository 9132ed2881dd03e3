"""Prepare the data of a run, with its tokenizer and vocabulary size, or find what is known of it before."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

from toolkit.checkpoints.folder import read_model_config
from toolkit.data.base import (
    DataModule,
    LabelSet,
    PreparedData,
    Report,
    data_modules,
    epoch_rows,
    is_ragged,
    largest_token,
    mean_length,
    row_count,
)
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.rows import PythonData, check_rows
from toolkit.data.tokens.synthetic import SyntheticRows
from toolkit.errors import UserError
from toolkit.extension import is_built_in
from toolkit.io.paths import is_path_option
from toolkit.models.config import ModelConfig
from toolkit.objectives import Objective
from toolkit.optim.schedule import build_schedule
from toolkit.planning.limits import Progress, build_limits
from toolkit.planning.own_tokenizer import download_hint, own_repository
from toolkit.planning.resolve import ResolvedConfig, has_limit, model_tokens, with_known_vocabulary, with_model_limit
from toolkit.planning.run_args import RunArgs
from toolkit.ui.formats import format_count

MAX_STAND_IN_RATIO = 100
"""Tokens that a model wants, relative to those of the default text, up to which that text is right for it. The default
model wants 45 times as many, one of 124M parameters 1,075 times."""


def prepare_data(
    args: RunArgs, seq_length: int | None, report: Report, has_old_tokenizer: bool | None = None
) -> PreparedData:
    """Prepare the data with the tokenizer of --tokenizer_dir, else of the initial checkpoint, else of the data.

    ``has_old_tokenizer``: whether to read --tokenizer_dir as older versions did.
    """
    tokenizer, is_tokens = None, isinstance(args.data, PythonData)
    if args.tokenizer_dir is not None:
        tokenizer = Tokenizer.load(args.tokenizer_dir, report=report, is_own=has_old_tokenizer or None)
    elif args.base_dir is not None and not (is_tokens and not (args.base_dir / "tokenizer.json").is_file()):
        tokenizer = Tokenizer.load(args.base_dir, "checkpoint_dir")
    if (repository := own_repository(args)) is not None:
        report(f"note: training a new tokenizer on the data; {download_hint(repository)}")
    elif args.tokenizer_dir != getattr(args.requested, "tokenizer_dir", args.tokenizer_dir):
        report(f"Tokenizer: {args.tokenizer_dir}")
    model = None if args.objective.head is None or args.base_dir is None else read_model_config(args.base_dir)
    of_rows = row_options(args.objective, model)
    data = args.data.prepare(tokenizer=tokenizer, max_seq_length=seq_length or 0, report=report, **of_rows)
    if not is_built_in(type(args.data)):
        check_rows(f"--data {type(args.data).__name__}", data, seq_length)
    count, batch_size = row_count(data.train), args.train.global_batch_size
    if count is not None and count < batch_size:
        rows = "samples" if seq_length is None else f"rows of at most {seq_length} tokens"
        fixes = "lower it" if is_ragged(data.train) else "lower it or --train.max_seq_length"
        if hasattr(args.data, "find_rows") and data.val is not None and args.data.find_rows()[1].val is None:
            fixes += ", hold out less (--data.val_split_fraction)"
        raise UserError(
            f"--train.global_batch_size {batch_size}: the training data has only {count} {rows}; {fixes}, or add data"
        )
    return data


def describe_stand_in(config: ResolvedConfig, rows: Any) -> str | None:
    """Describe what a model from scratch would need if the default text is far too short for it; otherwise None.

    A model wants 20 tokens per parameter, see :func:`toolkit.planning.resolve.with_model_limit`.
    """
    args, model, count = config.args, config.model, epoch_rows(rows.train)
    if not args.data.is_stand_in or args.model_name is None or model is None or count is None:
        return None
    tokens, wanted = count * mean_length(rows.train), model_tokens(model)
    if wanted <= MAX_STAND_IN_RATIO * tokens:
        return None
    return (
        f"note: this data is a stand-in, {format_count(tokens)} tokens of Python's standard library; {model.name} "
        f"wants {format_count(wanted)}, 20 per parameter: `toolkit {args.command} {args.model_name} "
        f"--data HuggingFaceText --data.repo_id HuggingFaceFW/fineweb-edu --data.subset sample-100BT` streams text"
    )


def row_options(objective: Objective, model: ModelConfig | None) -> dict[str, Any]:
    """Return the options of ``DataModule.prepare`` that tell what a row is, and the labels of a model with a head."""
    if objective.row_kind == "answers":
        return {}  # only instruction data has these options, see the table of options
    options: dict[str, Any] = {"kind": objective.row_kind}
    if model is not None and model.labels is not None and model.problem_type is not None:
        options["labels"] = LabelSet(model.labels, model.problem_type)
    return options


def complete(config: ResolvedConfig, data: PreparedData | Any, done: Progress | None = None) -> ResolvedConfig:
    """Complete a configuration with what depends on the data: vocabulary, limits and LR schedule.

    Instead of data, a planner has what is known of it: ``train``, ``val`` and ``define_length(train_args)``. Limits and
    schedule stay None if the length is unknown. ``done`` is the progress of the checkpoint to resume.

    Raises:
        UserError: The model, the limits or the schedule do not fit the data.
    """
    args, rows, model = config.args, data.train, config.model
    if isinstance(data, PreparedData):
        model = with_vocabulary(model, data)
    elif model is not None:
        model = with_known_vocabulary(model, args)
    config = replace(config, model=model, is_ragged=is_ragged(rows) or is_ragged(data.val))
    if not isinstance(data, PreparedData) and not data.define_length(args.train):
        return config
    length, count = "", epoch_rows(rows)
    if not has_limit(args.train):
        assert model is not None, "named"
        args, length = with_model_limit(args, model, mean_length(rows) * (count or math.inf))
    limits = build_limits(
        args.train, done or Progress(), n_rows=count, tokens_per_row=mean_length(rows), is_ragged=is_ragged(rows)
    )
    schedule = build_schedule(args.train, limits.total_steps, args.defaults)
    return replace(config, args=args, limits=limits, schedule=schedule, length=length)


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
        largest = max(largest_token(rows) for rows in (data.train, data.val) if rows is not None)
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


def option_to_trust(data: DataModule) -> str | None:
    """Return the first option that names a path or repository, with its value; None if there is none."""
    for module in data_modules(data):
        default = {field.name: field.default for field in fields(module)}  # type: ignore[arg-type]  # all are dataclasses
        for option, value in vars(module).items():
            # "" is unset in checkpoints of older versions
            if (is_path_option(option) or option == "repo_id") and value not in (None, "", default[option]):
                return f"{option} {value}"
    return None
