"""What a run will be, from its arguments and the place alone: a run and its plan decide here, alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from toolkit.checkpoints.folder import find_checkpoint_dir, read_model_config
from toolkit.config import Precision, TrainArgs, fill
from toolkit.distributed.strategy import StrategyPlan, plan_strategy
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import DEFAULT_MODEL, family_of, get_config
from toolkit.models.gpt import GPT
from toolkit.planning.batch import BatchPlan, plan_batch
from toolkit.planning.optimizer import resolve_optimizer
from toolkit.planning.run_args import RunArgs


@dataclass(frozen=True)
class ResolvedConfig:
    """A run before anything is started.

    Args:
        args: With the command's defaults filled in, and the precision.
        device: "cpu", "cuda" or "mps".
        strategy: With its mesh.
        batch: How the global batch is cut.
        config: The architecture; None for a user-provided module. Its vocabulary may come from the tokenizer.
        max_seq_length: Tokens of the longest row; None where the data decides.
        optimizer: See :func:`toolkit.planning.optimizer.resolve_optimizer`.
    """

    args: RunArgs
    device: str
    strategy: StrategyPlan
    batch: BatchPlan
    config: ModelConfig | None
    max_seq_length: int | None
    optimizer: dict[str, Any]

    @property
    def precision(self) -> Precision:
        assert self.args.precision is not None
        return self.args.precision


def resolve_config(args: RunArgs, device: str, devices: int, num_nodes: int, precision: Precision) -> ResolvedConfig:
    """Decide what the run of ``args`` is on so many devices per node.

    Raises:
        UserError: options that do not go together, or would have no effect.
    """
    args = replace(with_defaults(args), precision=precision)
    sizes = {"devices": devices, "num_nodes": num_nodes}
    strategy = plan_strategy(args.strategy, args.fsdp, args.ddp, **sizes, accelerator=device, precision=precision)
    if args.timeout is not None and devices * num_nodes == 1:
        raise UserError(f"--timeout {args.timeout}: would have no effect, one process waits for no other")
    if args.lora is not None:
        _require_fit_for_adapters(args, strategy.kind)
    batch = plan_batch(args.train.global_batch_size, args.train.micro_batch_size, **sizes)
    config = choose_model(args)
    length = choose_length(args.train, config)
    if strategy.kind == "fsdp" and args.module is not None and not args.block_classes:
        raise UserError("--strategy fsdp: shards the blocks of a model, and none were found; name them: block_classes")
    if strategy.kind == "fsdp" and args.optimizer.name.lower() == "adafactor":
        raise UserError(
            "--optimizer.name Adafactor: looks at whole matrices, and fsdp gives it parts; use --strategy ddp or AdamW"
        )
    optimizer = resolve_optimizer(args.optimizer, args.defaults.optimizer, precision, args.optimizer_class)
    return ResolvedConfig(args, device, strategy, batch, config, length, optimizer)


def _require_fit_for_adapters(args: RunArgs, strategy: str) -> None:
    """Refuse options that do not go with adapters, or with a quantised base."""
    if args.quantize is not None:
        if strategy == "fsdp":
            raise UserError(
                f"--quantize {args.quantize}: does not go with --strategy fsdp, which cannot shard weights of 4 bits; "
                "use --strategy ddp"
            )
        if args.precision == "16-mixed":
            raise UserError(f"--precision 16-mixed: is not proven with --quantize {args.quantize}; use bf16-true")
        if args.compiler != "none":
            raise UserError(f"--compiler {args.compiler}: does not go with --quantize {args.quantize}; leave one out")
    if args.fsdp.state_dict_type == "sharded":
        raise UserError(
            "--fsdp.state_dict_type sharded: would have no effect, every device holds all adapters; leave it out"
        )
    if args.train.tie_embeddings is not None:
        raise UserError(f"--train.tie_embeddings {args.train.tie_embeddings}: the base stays as it is; leave it out")


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
