"""The one assembly: from arguments to Fabric, model, data, optimizer, resume and loggers, and into the loop."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything

import toolkit.data
from toolkit.args import CommandDefaults, EvalArgs, LogArgs, OptimizerArgs, Precision, TrainArgs, fill
from toolkit.checkpoints.folder import find_checkpoint_dir, fitting_weights, read_model_config
from toolkit.checkpoints.store import exclusive, resolve_resume
from toolkit.data.base import DataModule, Prepared
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.fabric import Accelerator, build_fabric
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig, ModelOverrides
from toolkit.models.families import DEFAULT_MODEL, family_of, get_config
from toolkit.models.gpt import GPT
from toolkit.models.init import initialize
from toolkit.training.batch import BatchPlan, plan_batch
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.limits import build_limits
from toolkit.training.loop import Run, fit
from toolkit.training.optimizer import build_optimizer, resolve_optimizer
from toolkit.training.schedule import Schedule, build_schedule
from toolkit.training.state import Identity, Progress, read_meta
from toolkit.training.throughput import Throughput, flops_per_token, peak_flops
from toolkit.ui.loggers import MetricsCSV, check_logger, make_loggers
from toolkit.ui.plots import plot_loss
from toolkit.ui.progress import make_progress


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
    out_dir: str
    resume: bool | str
    initial_checkpoint_dir: str | None
    tokenizer_dir: str | None
    accelerator: Accelerator
    precision: Precision | None
    compiler: str
    logger_name: str
    seed: int


def run_training(args: RunArgs) -> None:
    """Train as the arguments say, from a fresh start or from a checkpoint.

    Raises:
        UserError: a mistake in the arguments; nothing has been written.
        GuardError, StoppedBySignal: see :func:`toolkit.training.loop.fit`.
    """
    launched = time.perf_counter()
    args = with_defaults(args)
    fabric, precision = build_fabric(args.accelerator, args.precision)
    args = replace(args, precision=precision)
    plan = plan_batch(args.train.global_batch_size, args.train.micro_batch_size, devices=fabric.world_size)
    out_dir = Path(args.out_dir)
    resume_from = resolve_resume(args.resume, out_dir)
    config = choose_model(args)
    seq_length = choose_length(args.train, config)
    optimizer_options = resolve_optimizer(args.optimizer, args.defaults.optimizer, precision)
    check_logger(args.logger_name, args.log)
    with ExitStack() as stack:
        display = stack.enter_context(make_progress(total_steps=None, enabled=fabric.is_global_zero))
        data = prepare_data(args, seq_length, display)
        config = with_vocabulary(config, data)
        identity = Identity(
            config.to_dict(), data.content_key, plan.global_batch_size, args.seed, precision, optimizer_options
        )
        progress = Progress() if resume_from is None else read_progress(resume_from, identity)
        limits = build_limits(args.train, progress, n_rows=len(data.train), tokens_per_row=seq_length)
        schedule = build_schedule(args.train, limits.total_steps, args.defaults)
        if limits.reached(progress.step, progress.tokens) and resume_from == out_dir / "final":
            display.message(f"{resume_from} has reached step {progress.step}: the run is finished, nothing to do")
            return

        seed_everything(args.seed, verbose=False)
        module = build_model(args, config, resume_from)
        flops = flops_per_token(module, config, seq_length)
        display.total_steps = limits.total_steps
        display.message(describe(config, module, plan, fabric, precision, schedule, seq_length))
        optimizer = build_optimizer(module, optimizer_options, schedule.peak, precision)
        if args.compiler == "torch":
            compile_blocks(module)
        model, wrapped_optimizer = fabric.setup(module, optimizer)
        checkpointer = Checkpointer(
            out_dir=out_dir,
            module=module,
            optimizer=optimizer,
            scaler=getattr(fabric.strategy.precision, "scaler", None),
            config=config,
            tokenizer=data.tokenizer,
            hyperparameters=hyperparameters(args),
            identity=identity,
            schedule=schedule,
            keep_last=args.train.keep_last or 0,
        )
        if resume_from is not None:
            checkpointer.restore(resume_from, fabric.global_rank)
            display.message(f"going on from {resume_from}: step {progress.step}, {progress.tokens:,} tokens")
            tell_changed_schedule(resume_from, schedule, display)
        stack.enter_context(exclusive(out_dir))
        if resolve_resume(args.resume, out_dir) != resume_from:
            raise UserError(f"--out_dir {out_dir}: another process has just run there; start again")
        csv, loggers = open_logs(args, fabric, None if resume_from is None else progress.step)
        peak = peak_flops(fabric.device, precision)
        run = Run(
            fabric=fabric,
            model=model,
            optimizer=wrapped_optimizer,
            data=data,
            plan=plan,
            limits=limits,
            schedule=schedule,
            train=args.train,
            eval=args.eval,
            progress=progress,
            throughput=Throughput(flops, None if peak is None else peak * fabric.world_size),
            seed=args.seed,
            num_workers=args.data.num_workers,
            display=display,
            csv=csv,
            loggers=loggers,
            checkpointer=checkpointer,
            token_bytes=None if data.tokenizer is None else data.tokenizer.token_bytes(),
            resumed=resume_from is not None,
            launched=launched,
            seconds_before=progress.seconds,
        )
        status = "failed"
        try:
            fit(run)
            status = "success"
        finally:
            close_logs(run, out_dir, status)
        if run.skipped_steps:
            display.message(f"the fp16 scaler left out {run.skipped_steps} steps")
        display.message(
            f"finished after {progress.step:,} steps and {progress.tokens:,} tokens; model in {out_dir / 'final'}"
        )


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
    train = fill(args.train, args.defaults.train)
    if all(limit is None for limit in (train.max_steps, train.max_tokens, train.epochs, train.max_time)):
        if args.initial_checkpoint_dir is not None or choose_model(args).name != DEFAULT_MODEL:
            raise UserError(
                "--train.max_tokens: the length of the run must be given; "
                "set --train.max_tokens, --train.max_steps, --train.epochs or --train.max_time"
            )
        train = replace(train, **args.defaults.default_model_length)
    return replace(args, train=train)


def choose_model(args: RunArgs) -> ModelConfig:
    """The named architecture, or that of the initial checkpoint, with the user's changes."""
    if args.initial_checkpoint_dir is not None:
        config = read_model_config(find_checkpoint_dir(args.initial_checkpoint_dir))
    else:
        config = get_config(args.model_name or DEFAULT_MODEL)
    config = config.override(args.model_config)
    if args.train.tie_embeddings is not None:
        config = replace(config, tie_embeddings=args.train.tie_embeddings)
    family_of(config)  # an architecture that belongs to none could be trained, but never exported
    return config


def choose_length(train: TrainArgs, config: ModelConfig) -> int:
    """Tokens per sequence.

    Raises:
        UserError: longer than the model's context.
    """
    length = train.max_seq_length or config.block_size
    if length > config.block_size:
        raise UserError(
            f"--train.max_seq_length {length}: {config.name or 'the model'} takes at most {config.block_size} tokens; "
            f"lower it, or raise --model_config.block_size"
        )
    return length


def prepare_data(args: RunArgs, seq_length: int, display: Any) -> Prepared:
    """Prepare the data with the tokenizer of the run: --tokenizer_dir, else the initial checkpoint's, else its own.

    Raises:
        UserError: there is less text than one global batch.
    """
    tokenizer = None
    folder = args.tokenizer_dir or args.initial_checkpoint_dir
    if folder is not None:
        tokenizer = Tokenizer.load(folder if args.tokenizer_dir else find_checkpoint_dir(folder))
    display.phase("preparing data")
    data = args.data.prepare(tokenizer=tokenizer, max_seq_length=seq_length, report=display.message)
    if len(data.train) < args.train.global_batch_size:
        raise UserError(
            f"--train.global_batch_size {args.train.global_batch_size}: the training data has only {len(data.train)} "
            f"sequences of {seq_length} tokens; give more text, a smaller batch or a shorter --train.max_seq_length"
        )
    return data


def with_vocabulary(config: ModelConfig, data: Prepared) -> ModelConfig:
    """The config with the vocabulary of the tokenizer, or of data that comes as tokens, where it has none of its own.

    Raises:
        UserError: there is no vocabulary to take, or a larger one than the model's.
    """
    sizes = [data.tokenizer.vocab_size if data.tokenizer is not None else None, data.vocab_size]
    known = [size for size in sizes if size is not None]
    if config.vocab_size is None and not known:
        raise UserError(
            f"--tokenizer_dir: {config.name} takes its vocabulary from the tokenizer; "
            "give one, or --model_config.vocab_size"
        )
    config = config.with_vocab_size(max(known)) if known else config
    if known and max(known) > config.padded_vocab_size:
        raise UserError(
            f"--model_config.vocab_size {config.vocab_size}: the data has {max(known)} different tokens; "
            f"give the tokenizer of the model, or --model_config.vocab_size {max(known)}"
        )
    return config


def read_progress(folder: Path, identity: Identity) -> Progress:
    """Read how far a checkpoint had come, and check that it belongs to the same run."""
    meta = read_meta(folder)
    identity.require_same(meta["identity"], folder)
    return Progress(step=meta["step"], tokens=meta["tokens"], samples=meta["samples"], seconds=meta["seconds"])


def tell_changed_schedule(folder: Path, schedule: Schedule, display: Any) -> None:
    old, new = read_meta(folder)["schedule"], asdict(schedule)
    changes = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    if changes:
        display.message(f"the rest of the learning rate's curve follows the new settings: {', '.join(changes)}")


def build_model(args: RunArgs, config: ModelConfig, resume_from: Path | None) -> GPT:
    """Build the model on the CPU with its weights: a checkpoint's, or drawn from the seed."""
    with torch.device("meta"):
        model = GPT(config)
    initialize(model, args.seed)
    source = resume_from or (args.initial_checkpoint_dir and find_checkpoint_dir(args.initial_checkpoint_dir))
    if source:
        with torch.no_grad():
            own = model.state_dict()
            for name, weight in fitting_weights(source, model).items():
                own[name].copy_(weight)
    return model


def compile_blocks(model: GPT) -> None:
    """Compile each block in place: its class and the names of its weights stay as they are."""
    for block in model.transformer.h:
        block.compile()


def hyperparameters(args: RunArgs) -> dict[str, Any]:
    """The options of this run as ``toolkit SUB --config`` takes them, defaults filled in."""
    values = {k: v for k, v in vars(args).items() if k != "defaults"} | {"resume": False}
    values["optimizer"] = fill(args.optimizer, args.defaults.optimizer)
    plain = {k: asdict(v) if is_dataclass(v) else v for k, v in values.items()}
    plain["model_config"] = {k: v for k, v in plain["model_config"].items() if v is not None}
    kind = type(args.data)
    own = getattr(toolkit.data, kind.__name__, None) is kind
    path = kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"
    plain["data"] = {"class_path": path, "init_args": plain["data"]}
    return plain


def describe(
    config: ModelConfig,
    module: GPT,
    plan: BatchPlan,
    fabric: Fabric,
    precision: str,
    schedule: Schedule,
    seq_length: int,
) -> str:
    """The run in one line."""
    parameters = sum(p.numel() for p in module.parameters())
    full, causal = (flops_per_token(module, config, seq_length, causal=half) / 1e6 for half in (False, True))
    return (
        f"{config.name}: {parameters:,} parameters, {full:.1f} MFLOP per token ({causal:.1f} with causal attention "
        f"counted by half); {fabric.device}, {precision}; {plan}; peak learning rate {schedule.peak:.3g}"
    )


def open_logs(args: RunArgs, fabric: Fabric, resume_step: int | None) -> tuple[MetricsCSV | None, list[Any]]:
    """Open metrics.csv and the loggers, on the first rank only."""
    if not fabric.is_global_zero:
        return None, []
    out_dir = Path(args.out_dir)
    csv = MetricsCSV(out_dir / "logs" / "metrics.csv", resume_step=resume_step)
    return csv, make_loggers(args.logger_name, out_dir, args.log, hyperparameters(args), resume_step)


def close_logs(run: Run, out_dir: Path, status: str) -> None:
    if run.csv is None:
        return
    run.csv.close()
    for logger in run.loggers:
        logger.finalize(status)
    plot_loss(run.csv.path, out_dir / "loss.png")
