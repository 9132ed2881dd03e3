"""The one assembly: from arguments to Fabric, model, data, optimizer, resume and loggers, and into the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.checkpoints.folder import find_checkpoint_dir
from toolkit.checkpoints.store import exclusive, require_free, resolve_resume
from toolkit.data.base import Rows
from toolkit.distributed import ranks
from toolkit.distributed.device import count_devices, pick_accelerator, pick_precision
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launch import RunGroup, Timeouts, launched
from toolkit.distributed.layout import Layout, read_layout
from toolkit.distributed.memory import keep_freed_memory
from toolkit.distributed.strategy import plan_strategy
from toolkit.errors import UserError
from toolkit.models.gpt import Block
from toolkit.training import adapters, best
from toolkit.training.batch import plan_batch
from toolkit.training.checkpointer import Checkpointer, seed_from
from toolkit.training.limits import build_limits
from toolkit.training.loop import Run, fit
from toolkit.training.model import check_replicas, describe_model, plan_model, set_up_model, unwrapped
from toolkit.training.optimizer import build_optimizer, resolve_optimizer
from toolkit.training.resolve import (
    RunArgs,
    choose_length,
    choose_model,
    hyperparameters,
    is_repeatable,
    prepare_data,
    with_defaults,
    with_vocabulary,
)
from toolkit.training.samples import make_sampler
from toolkit.training.schedule import Schedule, build_schedule
from toolkit.training.state import Identity, Progress, read_meta
from toolkit.training.throughput import Throughput, flops_per_token, peak_flops
from toolkit.ui.loggers import MetricsCSV, check_logger, make_loggers
from toolkit.ui.plots import plot_loss
from toolkit.ui.progress import make_progress


def run_training(args: RunArgs) -> None:
    """Train as the arguments say, from a fresh start or from a checkpoint; every process of the run calls this.

    Raises:
        UserError: a mistake in the arguments; nothing has been written.
        GuardError, StoppedBySignal: see :func:`toolkit.training.loop.fit`.
        PeerLost, EndedTogether: see :func:`toolkit.distributed.launch.launched`.
    """
    launch_time = time.perf_counter()
    args = with_defaults(args)
    device = pick_accelerator(args.accelerator)
    precision = pick_precision(args.precision, device, args.defaults.cuda_precision)
    args = replace(args, precision=precision)
    layout = read_layout(args.devices, args.num_nodes, count_devices(device))
    sizes = {"devices": layout.devices, "num_nodes": layout.num_nodes}
    strategy = plan_strategy(args.strategy, args.fsdp, args.ddp, **sizes, accelerator=device, precision=precision)
    if args.lora is not None:
        adapters.require_usable(args, strategy.kind, precision)
    batch = plan_batch(args.train.global_batch_size, args.train.micro_batch_size, **sizes)
    config = choose_model(args)
    seq_length = choose_length(args.train, config)
    if strategy.kind == "fsdp" and args.module is not None and not args.block_classes:
        raise UserError("--strategy fsdp: shards the blocks of a model, and none were found; name them: block_classes")
    if strategy.kind == "fsdp" and args.optimizer.name.lower() == "adafactor":
        raise UserError(
            "--optimizer.name Adafactor: looks at whole matrices, and fsdp gives it parts; use --strategy ddp or AdamW"
        )
    optimizer_options = resolve_optimizer(args.optimizer, args.defaults.optimizer, precision, args.optimizer_class)
    check_logger(args.logger_name, args.log)
    out_dir = Path(args.out_dir)
    alone = layout.world_size == 1 or (layout.starts_processes and layout.num_nodes == 1)  # nobody waits yet
    resume_from = find_start(args) if alone else None
    fabric = build_fabric(
        strategy, layout, accelerator=device, precision=precision, fsdp=args.fsdp, ddp=args.ddp,
        block_classes=set(args.block_classes or (Block,)),
    )  # fmt: skip
    if args.timeout is not None and layout.world_size == 1:
        raise UserError(f"--timeout {args.timeout}: would have no effect, one process waits for no other")
    timeouts = Timeouts.of(args.timeout)
    with ExitStack() as stack:
        group = stack.enter_context(launched(fabric, layout, timeouts))
        stack.enter_context(explained_memory(args, device, layout))
        display = stack.enter_context(make_progress(total_steps=None, enabled=layout.global_rank == 0))
        if layout.global_rank == 0 and not alone:
            resume_from = find_start(args)
        display.phase("preparing data")
        data = group.first_then_others(lambda: prepare_data(args, seq_length, display.message))
        group.connect()
        resume_from = ranks.from_first(resume_from)
        model_plan = plan_model(
            with_vocabulary(config, data), args.module, args.block_classes, args.lora, args.quantize
        )
        seq_length = mean_length(data.train)
        base = None if args.lora is None else adapters.describe_base(args)
        identity = Identity(
            model_plan.facts, data.content_key, batch.global_batch_size, args.seed, precision, optimizer_options,
            {} if base is None else adapters.facts(base),
        )  # fmt: skip
        require_same_everywhere(args, identity)
        best.require_choice(args.train, args.eval, data)
        sampler = make_sampler(data, model_plan.config, args.eval.max_new_tokens)
        progress = Progress() if resume_from is None else read_progress(resume_from, identity)
        best.forget_what_is_gone(progress, out_dir)
        limits = build_limits(
            args.train,
            progress,
            n_rows=len(data.train),
            tokens_per_row=seq_length,
            is_ragged=getattr(data.train, "lengths", None) is not None,
        )
        schedule = build_schedule(args.train, limits.total_steps, args.defaults)
        if limits.reached(progress.step, progress.tokens) and resume_from == out_dir / "final":
            display.message(f"{resume_from} has reached step {progress.step}: the run is finished, nothing to do")
            return

        display.total_steps = limits.total_steps
        display.phase("building the model")
        flops = None
        if model_plan.config is not None:
            flops = flops_per_token(model_plan.module, model_plan.config, seq_length)
        display.message(
            f"{describe_model(model_plan, seq_length)}; {fabric.device.type}, {precision}; {batch}; "
            f"peak learning rate {schedule.peak:.3g}"
        )
        display.message(f"Strategy: {strategy}")
        initial = args.initial_checkpoint_dir
        source = find_checkpoint_dir(initial) if initial else None
        model = set_up_model(
            fabric, model_plan, seed=args.seed, precision=precision, compiler=args.compiler,
            source=resume_from or source if base is None else source,
            adapters=None if base is None else adapters.initial_adapters(args, model_plan, resume_from),
        )  # fmt: skip
        seed_from(args.seed, ranks.global_rank())  # else dropout would draw the same on all ranks
        optimizer = build_optimizer(
            unwrapped(model), optimizer_options, schedule.peak, precision, model_plan.spared, args.optimizer_class
        )
        checkpointer = Checkpointer(
            out_dir=out_dir,
            module=unwrapped(model),
            optimizer=optimizer,
            scaler=getattr(fabric.strategy.precision, "scaler", None),
            config=model_plan.config,
            tokenizer=data.tokenizer,
            hyperparameters=hyperparameters(args) if is_repeatable(args) else None,
            identity=identity,
            schedule=schedule,
            keep_last=args.train.keep_last or 0,
            tied=model_plan.tied,
            sharded=args.fsdp.state_dict_type == "sharded",
            seed=args.seed,
            adapters=base,
        )
        if resume_from is not None:
            checkpointer.restore(resume_from, progress.step)
            display.message(f"going on from {resume_from}: step {progress.step}, {progress.tokens:,} tokens")
            tell_changed_schedule(resume_from, schedule, display)
        opened = ranks.on_first(partial(open_outputs, args, out_dir, resume_from, progress.step, stack))
        csv, loggers = opened or (None, [])
        if checkpointer.sharded:
            require_shared_disk(out_dir)
        peak = peak_flops(fabric.device, precision)
        run = Run(
            fabric=fabric,
            model=model,
            optimizer=fabric.setup_optimizers(optimizer),
            data=data,
            plan=batch,
            limits=limits,
            schedule=schedule,
            train=args.train,
            eval=args.eval,
            progress=progress,
            throughput=Throughput(flops, None if peak is None else peak * layout.world_size),
            seed=args.seed,
            num_workers=args.data.num_workers,
            display=display,
            csv=csv,
            loggers=loggers,
            checkpointer=checkpointer,
            token_bytes=None if data.tokenizer is None else data.tokenizer.token_bytes(),
            sampler=sampler,
            resumed=resume_from is not None,
            launched=launch_time,
            seconds_before=progress.seconds,
            after_first_step=lambda: after_first_step(run, model_plan, strategy.shards, group),
            patient=partial(ranks.patience, timeouts.first, timeouts.later),
        )
        keep_freed_memory(device)  # only now: what loading has freed goes back (law M3)
        status = "failed"
        try:
            fit(run)
            status = "success"
        finally:
            ranks.set_timeout(timeouts.first)  # a logger may have much to send
            close_logs(run, out_dir, status)
        if run.skipped_steps:
            display.message(f"the fp16 scaler left out {run.skipped_steps} steps")
        display.message(
            f"finished after {progress.step:,} steps and {progress.tokens:,} tokens; model in {out_dir / 'final'}"
        )


@contextmanager
def explained_memory(args: RunArgs, device: str, layout: Layout) -> Iterator[None]:
    """Turn running out of memory into a UserError that says what the run needs and how it would fit."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        from toolkit.training.plan import Place, out_of_memory  # which plans runs of all commands

        raise out_of_memory(args, Place(device, layout.devices, layout.num_nodes)) from error


def mean_length(rows: Rows) -> float:
    """Input tokens of a row; of all rows, where they differ. Rows of somebody's own may be shorter than the context."""
    lengths = getattr(rows, "lengths", None)
    return len(rows[0]["input_ids"]) if lengths is None else float(lengths.mean())


def find_start(args: RunArgs) -> Path | None:
    """Return the checkpoint to go on from, if any."""
    require_free(Path(args.out_dir))
    return resolve_resume(args.resume, Path(args.out_dir))


def require_same_everywhere(args: RunArgs, identity: Identity) -> None:
    """Compare what the ranks are about to do.

    Raises:
        UserError: a node was started with other options, or sees other data.
    """
    facts = asdict(identity)
    for group in ("train", "eval", "optimizer", "fsdp", "ddp"):
        facts |= {f"--{group}.{name}": value for name, value in asdict(getattr(args, group)).items()}
    facts |= {f"--{name}": getattr(args, name) for name in ("strategy", "compiler", "timeout")}
    everywhere = ranks.gather(facts)
    for rank, theirs in enumerate(everywhere):
        if name := next((name for name in facts if theirs[name] != everywhere[0][name]), None):
            raise UserError(
                f"{name} {theirs[name]}: on rank {rank}, and {everywhere[0][name]} on rank 0; start every process with "
                "the same options, and let all nodes read the same files"
            )


def require_shared_disk(out_dir: Path) -> None:
    """Every rank writes its shards into the one folder that rank 0 has made.

    Raises:
        UserError: a node does not see it.
    """
    blind = [rank for rank, sees in enumerate(ranks.gather(out_dir.is_dir())) if not sees]
    if blind:
        raise UserError(
            f"--out_dir {out_dir}: rank {blind[0]} does not see it; give a folder on a disk that all nodes share, or "
            "--fsdp.state_dict_type full"
        )


def after_first_step(run: Run, model_plan: Any, shards: int, group: RunGroup) -> None:
    check_replicas(run.model, model_plan, shards)
    group.first_step_done()


def read_progress(folder: Path, identity: Identity) -> Progress:
    """Read how far a checkpoint had come, and check that it belongs to the same run."""
    meta = read_meta(folder)
    identity.require_same(meta["identity"], folder)
    return Progress(**{field.name: meta[field.name] for field in fields(Progress) if field.name in meta})


def tell_changed_schedule(folder: Path, schedule: Schedule, display: Any) -> None:
    old, new = read_meta(folder)["schedule"], asdict(schedule)
    changes = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    if changes:
        display.message(f"the rest of the learning rate's curve follows the new settings: {', '.join(changes)}")


def open_outputs(
    args: RunArgs, out_dir: Path, resume_from: Path | None, step: int, stack: ExitStack
) -> tuple[MetricsCSV, list[Any]]:
    """Take the folder for this run, and open metrics.csv and the loggers.

    Raises:
        UserError: another process runs there, or has done so a moment ago.
    """
    stack.enter_context(exclusive(out_dir))
    if resolve_resume(args.resume, out_dir) != resume_from:
        raise UserError(f"--out_dir {out_dir}: another process has just run there; start again")
    resume_step = None if resume_from is None else step
    csv = MetricsCSV(out_dir / "logs" / "metrics.csv", resume_step=resume_step)
    return csv, make_loggers(args.logger_name, out_dir, args.log, hyperparameters(args), resume_step)


def close_logs(run: Run, out_dir: Path, status: str) -> None:
    if run.csv is None:
        return
    run.csv.close()
    for logger in run.loggers:
        logger.finalize(status)
    plot_loss(run.csv.path, out_dir / "loss.png")
