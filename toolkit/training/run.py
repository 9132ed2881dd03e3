"""The one assembly: from arguments to Fabric, model, data, optimizer, resume and loggers, and into the loop."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from toolkit.checkpoints.adapters import AdapterInfo
from toolkit.checkpoints.folder import find_checkpoint_dir
from toolkit.checkpoints.lock import exclusive_lock, require_unlocked
from toolkit.checkpoints.resume import resolve_resume
from toolkit.checkpoints.store import FINAL, newest, rename_damaged
from toolkit.data.base import DataModule, PreparedData, TokenDataset, is_ragged
from toolkit.data.loader import choose_padding
from toolkit.distributed import ranks
from toolkit.distributed.device import (
    choose_attention_kernels,
    count_devices,
    deterministic_algorithms,
    pick_accelerator,
    pick_precision,
)
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launch import RunGroup, Timeouts, launch_processes
from toolkit.distributed.memory import keep_freed_memory
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import export_error
from toolkit.models.gpt import Block
from toolkit.training import adapters, best
from toolkit.training.agreement import require_same_everywhere, require_same_weights, require_shared_disk
from toolkit.training.checkpointer import Checkpointer, seed_from
from toolkit.training.decide import ResolvedConfig, resolve_config
from toolkit.training.evaluate import option_to_trust
from toolkit.training.limits import Limits, build_intervals, build_limits, require_ahead
from toolkit.training.loop import Run, fit
from toolkit.training.model import Plan, check_replicas, describe_model, plan_model, set_up_model, unwrapped
from toolkit.training.optimizer import build_optimizer
from toolkit.training.resolve import RunArgs, hyperparameters, is_repeatable, prepare_data, with_vocabulary
from toolkit.training.samples import Sampler, make_sampler
from toolkit.training.schedule import Schedule, build_schedule
from toolkit.training.state import Progress, RunFingerprint, read_meta
from toolkit.training.throughput import Throughput, flops_per_token, peak_flops
from toolkit.training.verify import find_intact, require_intact_together
from toolkit.ui.loggers import MetricsCSV, check_loggers, make_loggers
from toolkit.ui.plots import plot_loss
from toolkit.ui.progress import make_progress


def run_training(args: RunArgs) -> None:
    """Train as the arguments say, from a fresh start or from a checkpoint; every process of the run calls this.

    Raises:
        UserError: a mistake in the arguments; nothing has been written.
        GuardError, StoppedBySignalError: see :func:`toolkit.training.loop.fit`.
        PeerLostError, PeerShutdownError: see :func:`toolkit.distributed.launch.launch_processes`.
    """
    launch_time = time.perf_counter()
    device = pick_accelerator(args.accelerator)
    layout = detect_world(args.devices, args.num_nodes, count_devices(device))
    precision = pick_precision(args.precision, device, args.defaults.cuda_precision)
    decided = resolve_config(args, device, layout.devices, layout.num_nodes, precision)
    args = decided.args
    check_loggers(args.logger_name, args.log)
    alone = layout.world_size == 1 or (layout.starts_processes and layout.num_nodes == 1)  # nobody waits yet
    resume_from = resolve_resume_path(args) if alone else None
    fabric = build_fabric(
        decided.strategy, layout, accelerator=device, precision=precision, fsdp=args.fsdp, ddp=args.ddp,
        block_classes=set(args.block_classes or (Block,)),
    )  # fmt: skip
    timeouts = Timeouts.of(args.timeout)
    with ExitStack() as stack:
        group = stack.enter_context(launch_processes(fabric, layout, timeouts))
        group.ending.resume_hint = partial(resume_hint, Path(args.out_dir))
        stack.enter_context(oom_advice(args, device, layout))
        stack.enter_context(deterministic_algorithms(args.deterministic))
        display = stack.enter_context(make_progress(total_steps=None, enabled=layout.global_rank == 0))
        if layout.global_rank == 0 and not alone:
            resume_from = resolve_resume_path(args)
        display.phase("preparing data")
        data = group.first_then_others(lambda: prepare_data(args, decided.max_seq_length, display.message))
        group.init_process_group()
        resume_from, damaged = find_intact(args, resume_from, layout.local_rank == 0, display)
        start = prepare_run_state(decided, data, resume_from, damaged)
        if start.is_finished(Path(args.out_dir)):
            display.message(
                f"{start.resume_from} has reached step {start.progress.step}: the run is finished, nothing to do"
            )
            return
        display.total_steps = start.limits.total_steps
        display.phase("building the model")
        display.message(
            f"{describe_model(start.model, start.mean_length)}; {fabric.device.type}, {precision}; {decided.batch}; "
            f"peak learning rate {start.schedule.peak:.3g}"
        )
        display.message(f"Strategy: {decided.strategy}")
        if start.model.config is not None and (why := export_error(start.model.config)) is not None:
            display.message(f"note: {why}")
        if not start.model.ready and args.optimizer_class is None:
            from toolkit.training.plan import require_memory  # which plans runs of all commands

            require_memory(decided, layout.devices, start.model.config, start.model.module)
        run = build_run(fabric, decided, data, start, display, stack)
        run.launched = launch_time
        run.after_first_step = lambda: after_first_step(run, start.model, decided.strategy.shards, group)
        run.patient = partial(ranks.extended_timeout, timeouts.first, timeouts.later)
        keep_freed_memory(device)  # only now: what loading has freed goes back (M3)
        status = "failed"
        try:
            fit(run)
            status = "success"
        finally:
            ranks.set_timeout(timeouts.first)  # a logger may have much to send
            close_logs(run, Path(args.out_dir), status)
        log_summary(run, args.data, Path(args.out_dir))


@dataclass(frozen=True)
class RunState:
    """Where a run begins, and where it will end.

    Args:
        resume_from: The checkpoint that it goes on from, if any.
        progress: How far that had come.
        model: Not built yet.
        base: What adapters stand on; None where all weights are trained.
        identity: What may not change when it is resumed.
        limits, schedule: Of the whole run.
        mean_length: Input tokens of a row.
        flops: Of a token, counted before layers are packed or sharded; None for somebody's own model.
        sampler: Shows what the model says, if it is to be shown.
        damaged: Newer checkpoints of the run that were skipped.
    """

    resume_from: Path | None
    progress: Progress
    model: Plan
    base: AdapterInfo | None
    identity: RunFingerprint
    limits: Limits
    schedule: Schedule
    mean_length: float
    flops: float | None
    sampler: Sampler | None
    damaged: list[Path]

    def is_finished(self, out_dir: Path) -> bool:
        """Whether there is nothing left to do, and the last checkpoint is written."""
        reached = self.limits.reached(self.progress.step, self.progress.tokens)
        return reached and self.resume_from == out_dir / FINAL


def prepare_run_state(
    decided: ResolvedConfig, data: PreparedData, resume_from: Path | None, damaged: list[Path]
) -> RunState:
    """Find where the run stands, and require that all ranks are about to do the same.

    Raises:
        UserError: the checkpoint belongs to another run, or the ranks differ.
    """
    args = decided.args
    config = with_vocabulary(decided.config, data)
    model = plan_model(config, args.module, args.block_classes, args.lora, args.quantize)
    length = mean_length(data.train)
    base = None if args.lora is None else adapters.describe_base(args)
    identity = RunFingerprint(
        model.facts, data.content_key, decided.batch.global_batch_size, args.seed, decided.precision,
        decided.optimizer, {} if base is None else adapters.facts(base),
    )  # fmt: skip
    require_same_weights(args, base, resume_from)
    require_same_everywhere(args, identity)
    best.check_config(args.train, args.eval, data)
    sampler = make_sampler(data, config, args.eval.max_new_tokens, usual=args.defaults.eval["max_new_tokens"])
    progress = Progress() if resume_from is None else read_progress(resume_from, identity)
    best.reset_if_missing(progress, Path(args.out_dir), damaged)
    limits = build_limits(
        args.train, progress, n_rows=len(data.train), tokens_per_row=length, is_ragged=is_ragged(data.train)
    )
    if resume_from is not None:
        longest = longest_ragged(data, decided.max_seq_length) or math.ceil(length)
        require_ahead(args.train, progress, limits, longest, resume_from)
    schedule = build_schedule(args.train, limits.total_steps, args.defaults)
    flops = None if config is None else flops_per_token(model.module, config, length)
    return RunState(resume_from, progress, model, base, identity, limits, schedule, length, flops, sampler, damaged)


def build_run(
    fabric: Fabric, decided: ResolvedConfig, data: PreparedData, start: RunState, display: Any, stack: ExitStack
) -> Run:
    """Build the model and its optimizer, bring back their state, and open the folder of the run.

    Raises:
        UserError: weights do not fit, a file is broken, or the folder cannot be used.
    """
    args, plan, progress, out_dir = decided.args, start.model, start.progress, Path(decided.args.out_dir)
    initial = args.initial_checkpoint_dir
    source = find_checkpoint_dir(initial) if initial else None
    ragged, length = is_ragged(data.train) or is_ragged(data.val), decided.max_seq_length
    choose_attention_kernels(fixed_shapes=not ragged, has_masks=needs_masks(plan.config, length))
    reads_source = source is not None and (start.resume_from is None or start.base is not None)
    if ranks.broadcast_from_rank0(reads_source and args.verify_checkpoint):
        require_intact_together(source, fabric.local_rank == 0, display.message)
    model = set_up_model(
        fabric, plan, seed=args.seed, precision=decided.precision, compiler=args.compiler,
        longest_ragged=longest_ragged(data, length),
        source=start.resume_from or source if start.base is None else source,
        adapters=adapters.initial_adapters(args, plan, start.resume_from, display.message),
    )  # fmt: skip
    seed_from(args.seed, ranks.global_rank())  # else dropout would draw the same on all ranks
    optimizer = build_optimizer(
        unwrapped(model),
        decided.optimizer,
        start.schedule.peak,
        decided.precision,
        plan.no_decay_params,
        args.optimizer_class,
    )
    checkpointer = Checkpointer(
        out_dir=out_dir,
        module=unwrapped(model),
        optimizer=optimizer,
        scaler=getattr(fabric.strategy.precision, "scaler", None),
        config=plan.config,
        tokenizer=data.tokenizer,
        hyperparameters=hyperparameters(args) if is_repeatable(args) else None,
        identity=start.identity,
        schedule=start.schedule,
        keep_last=args.train.keep_last or 0,
        tied=plan.tied,
        sharded=args.fsdp.state_dict_type == "sharded",
        seed=args.seed,
        device=fabric.device,
        adapters=start.base,
    )
    if start.resume_from is not None:
        checkpointer.restore(start.resume_from, progress.step)
        display.message(f"going on from {start.resume_from}: step {progress.step}, {progress.tokens:,} tokens")
        tell_changed_schedule(start.resume_from, start.schedule, display)
    opened = ranks.run_on_rank0(partial(open_outputs, args, out_dir, start, display.message, stack))
    csv, loggers = opened or (None, [])
    if checkpointer.sharded:
        require_shared_disk(out_dir)
    peak = peak_flops(fabric.device, decided.precision)
    return Run(
        fabric=fabric,
        model=model,
        optimizer=fabric.setup_optimizers(optimizer),
        data=data,
        plan=decided.batch,
        limits=start.limits,
        intervals=build_intervals(args.train, args.eval, start.limits),
        schedule=start.schedule,
        train=args.train,
        eval=args.eval,
        progress=progress,
        throughput=Throughput(start.flops, None if peak is None else peak * ranks.world_size()),
        seed=args.seed,
        num_workers=args.data.num_workers,
        padding=choose_padding(fabric.device.type, ragged, length if plan.config is not None else None),
        display=display,
        csv=csv,
        loggers=loggers,
        checkpointer=checkpointer,
        token_bytes=None if data.tokenizer is None else data.tokenizer.token_bytes(),
        sampler=start.sampler,
        resumed=start.resume_from is not None,
        seconds_before=progress.seconds,
    )


def resume_hint(out_dir: Path) -> str:
    return f"--resume auto continues from {newest(out_dir) or 'the newest checkpoint, if one was saved'}"


def log_summary(run: Run, data: DataModule, out_dir: Path) -> None:
    if run.skipped_steps:
        run.display.message(f"the fp16 scaler left out {run.skipped_steps} steps")
    progress = run.progress
    run.display.message(
        f"finished after {progress.step:,} steps and {progress.tokens:,} tokens; model in {out_dir / FINAL}"
    )
    for command in next_commands(run, data, out_dir):
        run.display.message(f"  {command}")


def next_commands(run: Run, data: DataModule, out_dir: Path) -> list[str]:
    """What can be done with the model that the run has written; nothing where it is a module from Python."""
    config = run.checkpointer.config
    if config is None or run.checkpointer.hyperparameters is None:
        return []
    final, hf = (shlex.quote(str(path)) for path in (out_dir / FINAL, out_dir / "hf"))
    merge = "" if run.checkpointer.adapters is None else " --merge true"
    trust = "" if option_to_trust(data) is None else " --trust_checkpoint_data true"
    commands = {
        f'toolkit generate {final} --prompt "..."': run.data.tokenizer is not None,
        f"toolkit evaluate {final}{trust}": run.data.val is not None,
        f"toolkit convert_to_hf {final} {hf}{merge}": export_error(config) is None,
    }
    return [command for command, is_possible in commands.items() if is_possible]


@contextmanager
def oom_advice(args: RunArgs, device: str, layout: WorldInfo) -> Iterator[None]:
    """Turn running out of memory into a UserError that says what the run needs and how it would fit."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
        if not is_full:
            raise
        from toolkit.training.plan import DeviceSpec, out_of_memory  # which plans runs of all commands

        raise out_of_memory(args, DeviceSpec(device, layout.devices, layout.num_nodes)) from error


def mean_length(rows: TokenDataset) -> float:
    """Input tokens of a row; of all rows, where they differ. Rows of somebody's own may be shorter than the context."""
    lengths = getattr(rows, "lengths", None)
    return len(rows[0]["input_ids"]) if lengths is None else float(lengths.mean())


def longest_ragged(data: PreparedData, limit: int | None) -> int:
    """Tokens of the longest row, ``limit`` where the lengths are not known; 0 where all rows are equally long."""
    ragged = [rows for rows in (data.train, data.val) if is_ragged(rows)]
    known = [getattr(rows, "lengths", None) for rows in ragged]
    return max((limit or 1 if lengths is None else int(lengths.max()) for lengths in known), default=0)


def needs_masks(config: ModelConfig | None, length: int | None) -> bool:
    """Whether attention over rows of ``length`` tokens takes masks; that of a module of the user's may.

    Packed rows do, too: they are ragged.
    """
    return config is None or any(
        window is not None and (length is None or window < length)
        for window in map(config.window, range(config.n_layer))
    )


def resolve_resume_path(args: RunArgs) -> Path | None:
    """Return the checkpoint to go on from, if any."""
    require_unlocked(Path(args.out_dir))
    return resolve_resume(args.resume, Path(args.out_dir))


def after_first_step(run: Run, model_plan: Any, shards: int, group: RunGroup) -> None:
    check_replicas(run.model, model_plan, shards)
    group.first_step_done()


def read_progress(folder: Path, identity: RunFingerprint) -> Progress:
    """Read how far a checkpoint had come, and check that it belongs to the same run."""
    meta = read_meta(folder)
    identity.check_matches(meta["identity"], folder)
    return Progress(**{field.name: meta[field.name] for field in fields(Progress) if field.name in meta})


def tell_changed_schedule(folder: Path, schedule: Schedule, display: Any) -> None:
    old, new = read_meta(folder)["schedule"], asdict(schedule)
    changes = [f"{name} {old.get(name)} -> {new[name]}" for name in new if old.get(name) != new[name]]
    if changes:
        display.message(f"the rest of the learning rate's curve follows the new settings: {', '.join(changes)}")


def open_outputs(
    args: RunArgs, out_dir: Path, start: RunState, report: Callable[[str], None], stack: ExitStack
) -> tuple[MetricsCSV, list[Any]]:
    """Take the folder for this run, set damaged checkpoints aside, and open metrics.csv and the loggers.

    Raises:
        UserError: another process runs there, or has done so a moment ago.
    """
    stack.enter_context(exclusive_lock(out_dir))
    if resolve_resume(args.resume, out_dir) != next(iter(start.damaged), start.resume_from):
        raise UserError(f"--out_dir {out_dir}: another process has just run there; start again")
    for folder in start.damaged:  # else it would count as the run's newest, and for --train.keep_last
        report(f"renamed {folder} to {rename_damaged(folder).name}; delete it when you do not need it")
    resume_step = None if start.resume_from is None else start.progress.step
    csv = MetricsCSV(out_dir / "logs" / "metrics.csv", resume_step=resume_step)
    return csv, make_loggers(args.logger_name, out_dir, args.log, hyperparameters(args), resume_step)


def close_logs(run: Run, out_dir: Path, status: str) -> None:
    if run.csv is None:
        return
    run.csv.close()
    for logger in run.loggers:
        logger.finalize(status)
    plot_loss(run.csv.path, out_dir / "loss.png")
