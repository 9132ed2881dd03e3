"""The one training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn

from toolkit.args import EvalArgs, TrainArgs
from toolkit.checkpoints.store import BEST
from toolkit.data.base import PreparedData
from toolkit.data.loader import Padding, train_batches, val_batches
from toolkit.distributed import ranks
from toolkit.distributed.signals import SignalWatch
from toolkit.errors import GuardError, StoppedBySignalError
from toolkit.training import best
from toolkit.training.batch import BatchPlan
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.limits import Intervals, Limits
from toolkit.training.samples import Sampler
from toolkit.training.schedule import Schedule
from toolkit.training.state import Progress
from toolkit.training.step import MAX_SKIPPED_IN_A_ROW, train_step
from toolkit.training.throughput import Throughput, peak_memory_gb
from toolkit.training.validate import validate
from toolkit.ui.loggers import MetricsCSV, log_metrics


@dataclass
class Run:
    """Everything that the loop works with, put together in :mod:`toolkit.training.run`."""

    fabric: Fabric
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: PreparedData
    plan: BatchPlan
    limits: Limits
    intervals: Intervals
    schedule: Schedule
    train: TrainArgs
    eval: EvalArgs
    progress: Progress
    throughput: Throughput
    seed: int
    num_workers: int
    padding: Padding
    display: Any
    csv: MetricsCSV | None
    """None on all ranks but the first."""
    loggers: list[Any]
    checkpointer: Checkpointer
    token_bytes: np.ndarray | None = None
    """UTF-8 bytes of each token, for bits per byte; None without a tokenizer."""
    sampler: Sampler | None = None
    resumed: bool = False
    launched: float = 0.0
    """When this launch began, by time.perf_counter(): --train.max_time counts from here."""
    seconds_before: float = 0.0
    """Seconds of the launches before this one."""
    after_first_step: Callable[[], None] | None = None
    """Called once, after the first step of this launch."""
    patient: Callable[[], AbstractContextManager] = nullcontext
    """Within it, a rank may take its time: rank 0 writes a checkpoint."""
    skipped_steps: int = 0
    """Steps of this launch that the fp16 scaler left out."""


def fit(run: Run) -> None:
    """Train until a limit is reached, and write ``final/``.

    Raises:
        StoppedBySignalError: a signal came; the state has been saved.
        GuardError: the loss or the gradient is not finite; nothing has been saved.
    """
    with SignalWatch() as signals:
        if run.eval.initial_validation and not run.resumed:
            metrics = run_validation(run)
            record(run, metrics)
            after_validation(run, metrics)
        train_until_done(run, signals)
        save(run, "final")  # still under the watch: a signal must not cut short the run's last save


def train_until_done(run: Run, signals: SignalWatch) -> None:
    fabric, progress, limits, intervals = run.fabric, run.progress, run.limits, run.intervals
    if limits.reached(progress.step, progress.tokens):
        return
    last_saved = last_validated = time.perf_counter()
    step_seconds, skipped_in_a_row = 0.0, 0
    stream = train_batches(
        run.data.train,
        seed=run.seed,
        start_position=progress.samples,
        total_positions=limits.total_samples,
        global_batch_size=run.plan.global_batch_size,
        micro_batch_size=run.plan.micro_batch_size,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        num_workers=run.num_workers,
        padding=run.padding,
    )
    run.model.train()
    run.display.phase("training")
    while True:
        step_started = time.perf_counter()
        micro_batches = next(stream)

        # The one vote of the step: what the ranks must agree on, summed over them.
        left = math.inf if limits.max_seconds is None else run.launched + limits.max_seconds - step_started
        agreed = ranks.all_reduce_sum(
            n_tokens=sum(batch.n_tokens for batch in micro_batches),
            n_inputs=sum(batch.n_inputs for batch in micro_batches),
            signalled=int(signals.received > 0),
            time_is_up=int(left <= step_seconds),
            eval_is_due=int(step_started - last_validated >= (intervals.eval_seconds or math.inf)),
            save_is_due=int(step_started - last_saved >= (intervals.save_seconds or math.inf)),
        )
        if agreed["signalled"]:
            stop_for_signal(run, signals)

        learning_rate = run.schedule.learning_rate(progress.step)
        try:
            result = train_step(
                fabric,
                run.model,
                run.optimizer,
                micro_batches,
                n_tokens=agreed["n_tokens"],
                learning_rate=learning_rate,
                max_norm=run.train.max_norm,
            )
        except GuardError as error:
            raise GuardError(
                f"step {progress.step + 1} is not finite: {error}. Nothing of it was saved; "
                "lower --train.learning_rate or look at these samples"
            ) from None
        skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
        run.skipped_steps += result.skipped
        if skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise GuardError(
                f"step {progress.step + 1}: no fp16 loss scale gave a finite gradient in {skipped_in_a_row} steps"
            )

        progress.step += 1
        progress.tokens += agreed["n_inputs"]
        progress.samples += run.plan.global_batch_size
        if limits.total_samples is not None:
            progress.samples = min(progress.samples, limits.total_samples)  # the last batch of an epoch may be short
        step_seconds = time.perf_counter() - step_started
        if run.after_first_step is not None:
            run.after_first_step()
            run.after_first_step = None
        run.throughput.add(agreed["n_inputs"], step_seconds)

        # Now and then: validate, log, save.
        last = limits.reached(progress.step, progress.tokens) or agreed["time_is_up"] > 0
        is_eval_due = is_due(intervals.eval_steps, progress.step) or agreed["eval_is_due"] > 0
        validates = run.eval.final_validation if last else is_eval_due
        metrics = run_validation(run) if validates else {}
        if is_due(run.train.log_interval, progress.step) or last or metrics:
            shown = {"loss": result.loss, "learning_rate": learning_rate, "grad_norm": result.grad_norm}
            shown |= run.throughput.read() | {"peak_memory_gb": peak_memory_gb(fabric.device)}
            record(run, shown | metrics)
        if validates:
            after_validation(run, metrics)
            last_validated = time.perf_counter()
        if last:
            return
        if is_due(intervals.save_steps, progress.step) or agreed["save_is_due"]:
            save(run, f"step-{progress.step:08d}")
            last_saved = time.perf_counter()


def is_due(interval: int | None, step: int) -> bool:
    return bool(interval) and step % interval == 0


def stop_for_signal(run: Run, signals: SignalWatch) -> None:
    signal_number = max(ranks.all_gather_object(signals.received))
    folder = save(run, f"step-{run.progress.step:08d}")
    signals.ignore()
    raise StoppedBySignalError(
        signal_number, f"stopped after step {run.progress.step}; {folder} is saved, go on with --resume auto"
    )


def save(run: Run, name: str) -> Path:
    run.display.phase("saving")
    count_seconds(run)
    with run.patient():
        folder = run.checkpointer.save(name, run.progress)
    run.display.checkpoint(run.progress.step, folder)
    run.display.phase("training")
    return folder


def count_seconds(run: Run) -> None:
    run.progress.seconds = run.seconds_before + time.perf_counter() - run.launched


def run_validation(run: Run) -> dict[str, float]:
    """Validate on the held-out data; an empty dictionary where there is none.

    Raises:
        GuardError: the loss is not finite: the last update has ruined the weights.
    """
    if run.data.val is None or not len(run.data.val):
        return {}
    run.display.phase("validating")
    batches = val_batches(
        run.data.val,
        micro_batch_size=run.plan.micro_batch_size,
        rank=run.fabric.global_rank,
        world_size=run.fabric.world_size,
        max_rows=None if run.eval.max_iters is None else run.eval.max_iters * run.plan.global_batch_size,
        padding=run.padding,
    )
    metrics = validate(run.fabric, run.model, batches, run.token_bytes)
    if not math.isfinite(metrics.get("val_loss", 0.0)):
        raise GuardError(
            f"the validation loss after step {run.progress.step} is {metrics['val_loss']}: the weights are ruined and "
            "were not saved; lower --train.learning_rate and go on with --resume auto"
        )
    run.display.phase("training")
    return metrics


def after_validation(run: Run, metrics: dict[str, float]) -> None:
    """Have the model say something, and keep it if it is the best so far."""
    if run.sampler is not None:
        run.sampler.show(run.model, run.progress.step, run.display)
    if run.train.keep_best and best.is_best(run.progress, metrics):
        save(run, BEST)


def record(run: Run, metrics: dict[str, float]) -> None:
    """Hand the metrics of a step to the display, metrics.csv and the loggers."""
    progress = run.progress
    if not metrics or run.csv is None:
        return
    count_seconds(run)
    run.csv.write({"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds, **metrics})
    log_metrics(run.loggers, metrics, progress.step)
    shown = {"tokens": progress.tokens} | metrics
    if "loss" in metrics:
        run.display.step(progress.step, {k: v for k, v in shown.items() if not k.startswith("val_")})
    if "val_loss" in metrics:
        run.display.validation(progress.step, {k: v for k, v in shown.items() if k.startswith("val_")})
