"""What a run will be, from the arguments alone: nothing is started, built or written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import nn

import toolkit.data
from toolkit.args import (
    Accelerator,
    CommandDefaults,
    DDPArgs,
    Devices,
    EvalArgs,
    FSDPArgs,
    LogArgs,
    OptimizerArgs,
    Precision,
    Strategy,
    TrainArgs,
    fill,
)
from toolkit.checkpoints.folder import find_checkpoint_dir, read_model_config
from toolkit.data.base import DataModule, PreparedData, TokenDataset
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.chunks import TokenRows
from toolkit.data.tokens.in_memory import InMemoryData
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.families import DEFAULT_MODEL, family_of, get_config
from toolkit.models.gpt import GPT
from toolkit.models.lora_config import LoRAConfig


@dataclass
class RunArgs:
    """What a training command hands over: the user's options, and the defaults of the command."""

    defaults: CommandDefaults
    model_name: str | None
    model_config: ModelOverrides
    data: DataModule
    train: TrainArgs
    eval: EvalArgs
    log: LogArgs
    optimizer: OptimizerArgs
    fsdp: FSDPArgs
    ddp: DDPArgs
    out_dir: str
    resume: bool | str
    initial_checkpoint_dir: str | None
    tokenizer_dir: str | None
    accelerator: Accelerator
    devices: Devices
    num_nodes: int | None
    strategy: Strategy
    precision: Precision | None
    compiler: str
    logger_name: str
    timeout: float | None
    seed: int
    deterministic: bool = False
    module: nn.Module | None = None
    """A user-provided model with its weights; then there is no ``model_name``."""
    block_classes: tuple[type[nn.Module], ...] = ()
    """The blocks of that model."""
    optimizer_class: type[torch.optim.Optimizer] | None = None
    """A class that torch.optim does not have; ``optimizer.name`` is its name."""
    lora: LoRAConfig | None = None
    """Train adapters beside the weights of ``initial_checkpoint_dir``, which are frozen."""
    quantize: str | None = None
    """How those weights are quantised."""
    from_peft: str | None = None
    """A folder of peft's with adapters to begin with."""
    callbacks: str | list[Any] | None = None
    """Class paths, see :func:`toolkit.training.callbacks.loading.load_callbacks`."""
    given: dict[str, Any] | None = None
    """The command's own arguments, where their names are not these fields'."""
    verify_checkpoint: bool = True
    """Compare what the run starts from with its checksums."""


def with_defaults(args: RunArgs) -> RunArgs:
    """Fill in what the command decides; the default model also has a length of its own.

    Raises:
        UserError: the run has no end, or an option is of no use.
    """
    if not args.out_dir:
        raise UserError("--out_dir '': give the name of a folder")
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed {args.seed}: must be from 0 to {2**32 - 1}")
    if args.model_name is not None and args.initial_checkpoint_dir is not None:
        raise UserError(
            f"model_name {args.model_name}: --initial_checkpoint_dir {args.initial_checkpoint_dir} brings its own "
            "architecture; leave one of them out"
        )
    if args.timeout is not None and args.timeout <= 0:
        raise UserError(f"--timeout {args.timeout}: must be greater than zero")
    train, evaluation = fill(args.train, args.defaults.train), fill(args.eval, args.defaults.eval)
    if all(limit is None for limit in (train.max_steps, train.max_tokens, train.epochs, train.max_time)):
        config = None if args.initial_checkpoint_dir is not None else choose_model(args)
        if not args.defaults.length_for_all and (config is None or config.name != DEFAULT_MODEL):
            raise UserError(
                "--train.max_tokens: the length of the run must be given; "
                "set --train.max_tokens, --train.max_steps, --train.epochs or --train.max_time"
            )
        train = replace(train, **args.defaults.length)
    return replace(args, train=train, eval=evaluation)


def choose_model(args: RunArgs) -> ModelConfig | None:
    """The named architecture or the initial checkpoint's, with the user's changes; None for a user-provided module."""
    if args.module is not None:
        return args.module.config if isinstance(args.module, GPT) else None
    if args.initial_checkpoint_dir is not None:
        config = read_model_config(find_checkpoint_dir(args.initial_checkpoint_dir))
    else:
        config = get_config(args.model_name or DEFAULT_MODEL)
    config = config.override(args.model_config)
    if args.train.tie_embeddings is not None:
        config = replace(config, tie_embeddings=args.train.tie_embeddings)
    family_of(config)  # an architecture that belongs to none could be trained, but never exported
    return config


def choose_length(train: TrainArgs, config: ModelConfig | None) -> int | None:
    """Tokens per sequence; None where the data decides.

    Raises:
        UserError: longer than the model's context.
    """
    if config is None:
        return train.max_seq_length
    length = train.max_seq_length or config.block_size
    if length > config.block_size:
        raise UserError(
            f"--train.max_seq_length {length}: {config.name or 'the model'} takes at most {config.block_size} tokens; "
            "lower it, or pretrain a model with a larger --model_config.block_size"
        )
    return length


def prepare_data(args: RunArgs, seq_length: int | None, report: Callable[[str], None]) -> PreparedData:
    """Prepare the data with the tokenizer of the run: --tokenizer_dir, else the initial checkpoint's, else its own.

    Raises:
        UserError: there is less text than one global batch.
    """
    tokenizer = None
    folder = args.tokenizer_dir or args.initial_checkpoint_dir
    if folder is not None:
        own = args.tokenizer_dir is not None
        tokenizer = Tokenizer.load(folder if own else find_checkpoint_dir(folder), *([] if own else ["checkpoint_dir"]))
    data = args.data.prepare(tokenizer=tokenizer, max_seq_length=seq_length or 0, report=report)
    if len(data.train) < args.train.global_batch_size:
        raise UserError(
            f"--train.global_batch_size {args.train.global_batch_size}: the training data has only {len(data.train)} "
            f"{_sequences(data.train, seq_length)} or a smaller batch"
        )
    return data


def _sequences(rows: TokenDataset, seq_length: int | None) -> str:
    """What the rows are, and what gives more of them."""
    if not hasattr(rows, "lengths"):
        of_length = f" of {seq_length} tokens" if seq_length else ""
        return f"sequences{of_length}; give more text, a shorter --train.max_seq_length"
    packed = getattr(rows, "packed", False)
    return "rows of packed samples; give more of them, no packing" if packed else "samples; give more of them"


def with_vocabulary(config: ModelConfig | None, data: PreparedData) -> ModelConfig | None:
    """The config with the vocabulary of the tokenizer, or of data that comes as tokens, where it has none of its own.

    A tokenizer may have tokens that the model does not embed (Gemma 3's has one for images), if the data has none of
    them; only then is the data read through.

    Raises:
        UserError: there is no vocabulary to take, or the data has tokens that the model does not embed.
    """
    if config is None:
        return None
    sizes = [data.tokenizer.vocab_size if data.tokenizer is not None else None, data.vocab_size]
    known = [size for size in sizes if size is not None]
    if config.vocab_size is None and not known:
        raise UserError(
            f"--tokenizer_dir: {config.name} takes its vocabulary from the tokenizer; "
            "give one, or --model_config.vocab_size"
        )
    config = config.with_vocab_size(max(known)) if known else config
    embedded = config.padded_vocab_size
    if not known or max(known) <= embedded:
        return config
    if data.vocab_size is not None:  # data that came as tokens says it
        largest = data.vocab_size - 1
    else:
        largest = max(_largest_token(rows) for rows in (data.train, data.val) if rows is not None)
    if largest >= embedded:
        raise UserError(
            f"--tokenizer_dir: gives {max(known)} different tokens, {largest} among those of this data, and the model "
            f"embeds 0 to {embedded - 1}; give the model's own tokenizer, or pretrain a model with "
            f"--model_config.vocab_size {max(known)}"
        )
    return config


def _largest_token(rows: TokenDataset) -> int:
    if isinstance(rows, TokenRows):
        return rows.survey()[1]
    return max(int(torch.as_tensor(row[name]).max()) for row in rows for name in ("input_ids", "labels"))


def is_repeatable(args: RunArgs) -> bool:
    """Whether the options say all of the run: no object from Python takes part."""
    ready = args.module is not None or isinstance(args.data, InMemoryData) or args.optimizer_class is not None
    return not ready


def hyperparameters(args: RunArgs) -> dict[str, Any]:
    """The options of this run as ``toolkit SUB --config`` takes them, defaults filled in; of ready data the class."""
    left_out = ("defaults", "module", "block_classes", "optimizer_class", "lora", "quantize", "from_peft", "given")
    values = {k: v for k, v in vars(args).items() if k not in left_out}
    if args.given is not None:
        values = {name: values.get(name, value) for name, value in args.given.items()}
    values |= {"resume": False}
    values["optimizer"] = fill(args.optimizer, args.defaults.optimizer)
    plain = {k: asdict(v) if is_dataclass(v) else v for k, v in values.items()}
    if "model_config" in plain:
        plain["model_config"] = {k: v for k, v in plain["model_config"].items() if v is not None}
    kind = type(args.data)
    own = getattr(toolkit.data, kind.__name__, None) is kind
    path = kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"
    plain["data"] = {"class_path": path, "init_args": {} if isinstance(args.data, InMemoryData) else plain["data"]}
    return plain
