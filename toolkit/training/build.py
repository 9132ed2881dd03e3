"""Launch a run and build its parts from the resolved config: data, model, checkpointer, callbacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric import Fabric

from toolkit.checkpoints.lock import exclusive_lock, require_unlocked
from toolkit.checkpoints.remote.run import RemoteRun
from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import rename_damaged
from toolkit.data.base import Report
from toolkit.data.batch import Padding, choose_padding
from toolkit.data.interleave import MixtureOrder
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.distributed.device import (
    choose_attention_kernels,
    deterministic_algorithms,
    fp32_reductions,
    pick_accelerator,
)
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launch import Timeouts, launch_processes
from toolkit.distributed.private_lightning import FabricModule
from toolkit.distributed.world import WorldInfo
from toolkit.errors import UserError
from toolkit.io.paths import is_url
from toolkit.io.tempfiles import sweep
from toolkit.models.attention_dispatch import needs_masks
from toolkit.models.gpt import Block
from toolkit.objectives.base import LOSS, checked_parts
from toolkit.objectives.inputs import original_module
from toolkit.optim.classes import build_optimizer
from toolkit.optim.update import Update, choose_update, set_learning_rate
from toolkit.planning.advice import oom_advice
from toolkit.planning.frozen import find_frozen
from toolkit.planning.plan import require_memory
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import RunArgs, keep_old_ends
from toolkit.planning.speed.gpus import peak_flops
from toolkit.reporting.page import REPORT, write_report
from toolkit.training import adapters
from toolkit.training.callbacks import (
    Callback,
    Console,
    EarlyStopping,
    ExternalLoggers,
    KeepBest,
    MetricsFile,
    MixtureShares,
    Profile,
    ReplicaCheck,
    SkipSpikes,
    ThroughputMonitor,
    Upload,
    notify,
    overrides,
)
from toolkit.training.callbacks.metrics import is_current, plot_run
from toolkit.training.callbacks.samples import make_sampler
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.checkpointer import Checkpointer, seed_generators
from toolkit.training.compiler import resolve_compiler
from toolkit.training.data import prepare_data, uses_old_ends, with_length
from toolkit.training.data_reader import DataReader
from toolkit.training.describe import describe_rounding, describe_run
from toolkit.training.frozen import build_frozen
from toolkit.training.model import build_model, unwrapped
from toolkit.training.reference import with_reference
from toolkit.training.run import Launch, Run, is_alone
from toolkit.training.start_state import StartState, keep_fused_qkv, prepare_start_state
from toolkit.training.throughput import Throughput
from toolkit.training.verify import fetch_on_other_nodes, find_intact, require_intact_on_all_ranks
from toolkit.ui.console import make_progress
from toolkit.ui.loggers import MetricsCSV, make_loggers, rows_crc

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


def launch_run(
    config: ResolvedConfig,
    world: WorldInfo,
    launched_at: float,
    resume_hint: Callable[[Path], str],
    stack: ExitStack,
) -> Launch:
    """Launch the processes, prepare the data, and agree on the checkpoint to resume from."""
    args, out_dir = config.args, config.args.run_dir
    json_file = sys.stdout if args.log.format == "json" else None
    if json_file is not None:
        stack.enter_context(redirect_stdout(sys.stderr))  # of everything that is not JSON
    remote = RemoteRun(args.out_dir, out_dir) if is_url(args.out_dir) else None
    # A single launcher searches before it starts processes, so that no other process has to wait for it.
    is_single_launcher = world.world_size == 1 or (world.starts_processes and world.num_nodes == 1)
    resume_from = _find_resume(args, remote, print) if is_single_launcher else None
    strategy, precision = config.strategy, config.precision
    if is_alone(args):
        strategy, precision = replace(strategy, kind="single"), "32-true"
    fabric = build_fabric(
        strategy,
        world,
        accelerator=pick_accelerator(args.accelerator),
        precision=precision,
        fsdp=config.fsdp,
        ddp=args.ddp,
        block_classes=set(args.block_classes or (Block,)),
        groups=args.groups,
    )
    group = stack.enter_context(launch_processes(fabric, world, Timeouts.from_minutes(args.timeout)))
    group.shutdown.resume_hint = partial(resume_hint, out_dir)
    stack.enter_context(deterministic_algorithms(args.deterministic))
    stack.enter_context(fp32_reductions())
    display: Any = stack.enter_context(make_progress(total_steps=None, enabled=world.global_rank == 0, file=json_file))
    if world.global_rank == 0 and not is_single_launcher:
        resume_from = _find_resume(args, remote, display.message)
    if group.decide_on_rank0(lambda: uses_old_ends(resume_from)):
        keep_old_ends(args.data)
    display.phase("preparing data")
    data = group.prepare_in_turns(lambda: prepare_data(args, config.max_seq_length, display.message))
    group.init_process_group()
    fetch_on_other_nodes(remote, args.resume, resume_from, world)
    resume_from, damaged = find_intact(args, resume_from, world.local_rank == 0, display)
    config = keep_fused_qkv(with_length(config, data, display.message), resume_from)
    state = prepare_start_state(config, data, resume_from, damaged)
    sampler = make_sampler(data, state.model.config, args.eval.max_new_tokens)
    return Launch(config, world, launched_at, remote, display, fabric, data, state, sampler)


def _find_resume(args: RunArgs, remote: RemoteRun | None, report: Report) -> Path | None:
    require_unlocked(args.run_dir)
    if remote is not None:
        remote.prepare(args.resume, report, keep_best=args.train.keep_best, verify=args.verify_checkpoint)
    return resolve_resume(args.resume, args.run_dir)


def finish_run(launch: Launch, stack: ExitStack) -> None:
    """Complete the cleanup, plot, report and uploads of a finished run, if an earlier launch could not."""
    display, state, remote = launch.display, launch.state, launch.remote
    display.message(f"{state.resume_from} has reached step {state.progress.step}: the run is finished, nothing to do")
    if launch.args.dry_run:
        return
    if launch.world.global_rank == 0:
        sweep(launch.out_dir)
        if not is_current(launch.out_dir, "loss.png"):
            plot_run(launch.out_dir)
        if not is_current(launch.out_dir, REPORT):
            write_report(launch.out_dir, "finished")
    if remote is not None:
        ranks.run_on_rank0(lambda: stack.enter_context(exclusive_lock(remote.out_dir)))
        start_uploads(remote, launch, stack).finish()


def build_run(launch: Launch, stack: ExitStack) -> Run:
    """Build the data reader, the model and the optimizer; restore their state if the run resumes."""
    state, fabric, display = launch.state, launch.fabric, launch.display
    launch.config = config = resolve_compiler(launch.config, state, fabric.device)
    launch.data = data = with_reference(launch)
    args, resume_from = config.args, state.resume_from
    padding, reader = build_reader(launch, stack)
    token_bytes = None if data.tokenizer is None else data.tokenizer.token_bytes()
    display.total_steps = state.limits.total_steps
    display.phase("building the model")
    stack.enter_context(
        oom_advice(config)
    )  # not earlier: a smaller micro-batch does not save memory in data preparation
    for line in describe_run(config, state, reader):
        display.message(line)
    if (gpt := state.model.meta_model) is not None and args.optimizer_class is None:
        require_memory(config, gpt.config, gpt)
    if state.frozen is not None:
        folder = find_frozen(args.objective)
        assert folder is not None
        args.objective.frozen = build_frozen(
            config, state.frozen, fabric, folder, display.message, state.longest_ragged
        )
        stack.callback(setattr, args.objective, "frozen", None)
    model = prepare_model(config, state, fabric, display.message)
    if (note := describe_rounding(config, state, model)) is not None:
        display.message(note)
    is_first_of_another_node = launch.world.local_rank == 0 and launch.world.global_rank != 0
    report_wait = ranks.rank_print if is_first_of_another_node else display.message  # reported in each node's log
    checkpointer = build_checkpointer(config, state, fabric, model, data.tokenizer, report_wait)
    if resume_from is not None:
        restore(checkpointer, resume_from, display.message)
    optimizer: Any = fabric.setup_optimizers(checkpointer.optimizer)
    return Run(
        **vars(launch),
        padding=padding,
        reader=reader,
        token_bytes=token_bytes,
        model=model,
        checkpointer=checkpointer,
        optimizer=optimizer,
        seconds_before=state.progress.seconds,
    )


def build_reader(launch: Launch, stack: ExitStack) -> tuple[Padding, DataReader]:
    """Start to read the training data from the run's progress on."""
    config, state, device = launch.config, launch.state, launch.fabric.device
    context = None if state.model.config is None else config.max_seq_length
    divisor = config.args.model_parallel.length_divisor
    padding = choose_padding(device.type, state.longest_ragged > 0, context, divisor)
    reader = DataReader(config, state, launch.data.train, padding, device)
    stack.callback(reader.close)
    return padding, reader


def restore(checkpointer: Checkpointer, folder: Path, report: Report) -> None:
    """Restore optimizer, scaler and random states from a checkpoint. The model already has its weights."""
    state = checkpointer.state
    progress, schedule = state.progress, state.schedule
    checkpointer.restore(folder, progress.step)
    set_learning_rate(checkpointer.optimizer, schedule.learning_rate(max(progress.step - 1, 0)))
    report(f"resuming from {folder}: step {progress.step}, {progress.tokens:,} tokens")
    old, new = read_meta(folder)["schedule"], asdict(schedule)
    changes = [
        f"{name} {_format_value(old.get(name))} -> {_format_value(new[name])}"
        for name in new
        if old.get(name) != new[name]
    ]
    if changes:
        report(f"LR schedule changed on resume: {', '.join(changes)}")


def _format_value(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def prepare_model(config: ResolvedConfig, state: StartState, fabric: Fabric, report: Report) -> FabricModule:
    """Verify the checkpoint to load weights from, build the model, and wrap it for the strategy."""
    args, source = config.args, config.args.base_dir
    choose_attention_kernels(
        fixed_shapes=not state.longest_ragged, has_masks=needs_masks(state.model.config, config.max_seq_length)
    )
    reads_source = state.resume_from is None or state.base is not None
    should_verify = ranks.broadcast_from_rank0(reads_source and args.verify_checkpoint)
    if source is not None and should_verify:
        require_intact_on_all_ranks(source, fabric.local_rank == 0, report, model_only=True)
    model = build_model(
        fabric,
        state.model,
        config,
        longest_ragged=state.longest_ragged,
        source=source if state.base is not None else state.resume_from or source,
        adapters=adapters.initial_adapters(args, state.model, state.resume_from, report),
    )
    if config.precision == "bf16-master" and config.strategy.kind == "single" and config.batch.accumulation > 1:
        for parameter in unwrapped(model).parameters():
            parameter.grad_dtype = torch.float32  # bf16 accumulation loses small contributions of micro-batches
    seed_generators(args.seed, ranks.global_rank())  # otherwise dropout would be the same on all ranks
    return model


def build_checkpointer(
    config: ResolvedConfig,
    state: StartState,
    fabric: Fabric,
    model: FabricModule,
    tokenizer: Tokenizer | None,
    report_wait: Report,
) -> Checkpointer:
    """Build the optimizer, and the checkpointer for model and optimizer."""
    module, spec = unwrapped(model), state.model
    optimizer = build_optimizer(
        module,
        config.optimizer,
        state.schedule.peak,
        config.precision,
        spec.no_decay_params,
        config.args.optimizer_class,
        spec.block_params,
    )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return Checkpointer(config, state, tokenizer, module, optimizer, scaler, fabric.device, report_wait)


def build_update(trainer: Trainer) -> Update:
    """Choose the update of the weights, the same on all ranks.

    If any rank has a gradient callback, all ranks take the unfused path; otherwise replicas would round differently
    (N4).
    """
    spikes = next((callback for callback in trainer.callbacks if isinstance(callback, SkipSpikes)), None)
    has_gradient_callbacks = any(overrides(callback, "on_before_optimizer_step") for callback in trainer.callbacks)
    return choose_update(
        trainer.fabric,
        trainer.model,
        trainer.optimizer,
        trainer.args.train.max_norm,
        before_update=(
            partial(notify, trainer.callbacks, "on_before_optimizer_step", trainer)
            if any(ranks.all_gather_object(has_gradient_callbacks))
            else None
        ),
        is_spike=None if spikes is None else spikes.is_spike,
        in_backward=trainer.args.optimizer.in_backward,
    )


def build_callbacks(run: Run, user_callbacks: Sequence[Callback], stack: ExitStack) -> list[Callback]:
    """Return all callbacks in order: checks, throughput, the user's, outputs, early stopping and best checkpoint.

    ``stack`` holds rank 0's lock on the folder until the run ends.
    """
    train, state = run.args.train, run.state
    peak = peak_flops(run.fabric.device, run.config.precision)
    throughput = Throughput(state.flops, None if peak is None else peak * ranks.world_size())
    callbacks: list[Callback] = [ReplicaCheck(state.model), ThroughputMonitor(throughput)]
    if run.args.profile:
        callbacks.append(Profile(run.args.profiler))
    if train.skip_spikes is not None:
        callbacks.append(SkipSpikes(train.skip_spikes))
    if isinstance(run.reader.order, MixtureOrder):
        callbacks.append(MixtureShares(run.reader.order))
    callbacks += user_callbacks
    columns = [f"val_loss_{name}" for name in run.data.val_sources]
    columns += [name for callback in callbacks for name in callback.columns]
    parts = [part.name for part in checked_parts(run.objective, original_module(run.model)) if part.name != LOSS]
    columns += [f"{prefix}{name}" for prefix in ("", "val_") for name in parts]
    wait_reporter = ranks.WaitReporter(f"open {run.out_dir}", run.display.message)
    csv = ranks.run_on_rank0(lambda: open_metrics(run, columns, stack), wait_reporter)
    callbacks += ranks.run_on_rank0(lambda: log_to(run, csv)) or []
    if run.remote is not None:
        callbacks.append(start_uploads(run.remote, run, stack))
    if ranks.global_rank() == 0:
        callbacks.append(Console())  # after the uploads, because it prints the final summary
    if run.sampler is not None:
        callbacks.append(run.sampler)
    if train.patience is not None:
        callbacks.append(EarlyStopping(train.patience))
    if train.keep_best:
        callbacks.append(KeepBest())
    return callbacks


def open_metrics(run: Run, columns: list[str], stack: ExitStack) -> MetricsCSV:
    """Lock the folder for this run, rename damaged checkpoints, and open metrics.csv. On rank 0."""
    args, state, out_dir = run.args, run.state, run.out_dir
    stack.enter_context(exclusive_lock(out_dir))
    sweep(out_dir)
    if resolve_resume(args.resume, out_dir) != next(iter(state.damaged), state.resume_from):
        raise UserError(f"--out_dir {out_dir}: another process has just used this folder; start the run again")
    for folder in state.damaged:  # otherwise it would count as the newest checkpoint, and for --train.keep_last
        run.display.message(f"renamed {folder} to {rename_damaged(folder).name}; delete it when you do not need it")
    resume_step = None if state.resume_from is None else state.progress.step
    path = out_dir / "logs" / "metrics.csv"
    expected = state.progress.logged_rows if state.resume_from and state.resume_from.parent == out_dir else 0
    is_changed = expected and state.progress.metrics_crc not in (0, rows_crc(path, expected))
    csv = MetricsCSV(path, resume_step, columns)
    if csv.n_resumed < expected or is_changed:
        lost = f"{expected - csv.n_resumed} of" if csv.n_resumed < expected else "some of"
        run.display.message(f"warning: {path}: {lost} the {expected} rows to step {resume_step} are lost or damaged")
    return csv


def log_to(run: Run, csv: MetricsCSV | None) -> list[Callback]:
    """Return the callbacks that write metrics.csv and log to the run's loggers. On rank 0."""
    assert csv is not None
    step = None if run.state.resume_from is None else run.state.progress.step
    values = run.config.hyperparameters()
    loggers = make_loggers(run.args.logger_name, run.out_dir, run.args.log, values, step, csv.logged_step)
    return [MetricsFile(csv), ExternalLoggers(loggers)]


def start_uploads(remote: RemoteRun, launch: Launch, stack: ExitStack) -> Upload:
    """Start to upload to the run's remote folder. Rank 0 must hold the lock on the staging folder."""

    def start() -> Uploader:
        uploader = remote.start_uploads(launch.args.train.keep_last, launch.display.message)
        stack.callback(uploader.close)
        return uploader

    return Upload(ranks.run_on_rank0(start), launch.args, launch.display)
