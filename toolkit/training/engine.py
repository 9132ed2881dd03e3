"""Run training from arguments to ``final/``. Start reading at :func:`open_run` and :class:`Engine`."""

import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch.profiler import record_function

from toolkit.checkpoints.store import FINAL, SAVE_NOW, STOP
from toolkit.config import AUTO
from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.cpu_memory import disable_malloc_trim
from toolkit.distributed.signals import SignalWatch
from toolkit.distributed.world import WorldInfo
from toolkit.errors import GuardError, StoppedByFileError, StoppedBySignalError, UserError, one_line
from toolkit.extension import require_single
from toolkit.objectives.base import total_counts
from toolkit.optim.update import FusedUpdate, set_learning_rate
from toolkit.planning.auto import resolve_auto
from toolkit.planning.limits import N_VALIDATIONS, build_intervals, is_due
from toolkit.planning.planner import oom_advice
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import RunArgs
from toolkit.training.build import build_checkpointer, build_models, build_reader, build_update
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.callbacks.registered import make_callbacks, with_checkpointer
from toolkit.training.callbacks.standard import build_callbacks, finish_run
from toolkit.training.callbacks.upload import uploads
from toolkit.training.control_files import ControlFiles
from toolkit.training.data_reader import DataReader
from toolkit.training.describe import describe_run
from toolkit.training.launch import Launch, detect_devices, is_alone, launch_run
from toolkit.training.launched_step import Clock, LaunchedStep, reads_late
from toolkit.training.rank_consistency import disk_leaders
from toolkit.training.resolve_compiler import resolve_compiler
from toolkit.training.run import Callback, Metrics, Run, callback_states, load_callback_states, overrides
from toolkit.training.step import launch_step
from toolkit.training.time_breakdown import DATA_WAIT


def run_training(args: RunArgs, callbacks: Sequence[Callback] = ()) -> None:
    """Train. Every process of the run calls this. ``callbacks`` run after ``--callbacks``.

    Raises:
        See :func:`start`.
    """
    start(*resolve_run(args, callbacks))


def resolve_run(args: RunArgs, callbacks: Sequence[Callback] = ()) -> tuple[ResolvedConfig, WorldInfo, list[Callback]]:
    """Return the resolved configuration, the processes, and the callbacks (``--callbacks`` first)."""
    devices, world = detect_devices(args)
    config = resolve_auto(args, devices)
    all_callbacks = [*load_callbacks(args.callbacks), *callbacks]
    for callback in all_callbacks if args.optimizer.in_backward else ():
        if overrides(callback, "on_before_optimizer_step"):
            raise UserError(
                f"--optimizer.in_backward true: {type(callback).__qualname__}.on_before_optimizer_step would see no "
                "gradients; remove one of them"
            )
    return config, world, all_callbacks


def start(config: ResolvedConfig, world: WorldInfo, callbacks: Sequence[Callback] = (), is_short: bool = False) -> None:
    """Build the run and train it. Every process of ``world`` calls this. See :func:`open_run` for the arguments.

    Raises:
        GuardError: the loss, the gradient or the weights are not finite, or replicas differ.
        StoppedBySignalError, StoppedByFileError: a signal or a file STOP stopped the run; the state has been saved.
        PeerLostError, PeerShutdownError: see :func:`toolkit.distributed.run_group.launch_processes`.
        DataError: data could not be read during the run; the state has been saved.
        CallbackError: a callback failed.
    """
    with ExitStack() as stack:
        run = open_run(config, world, callbacks, stack, is_short)
        if run is not None:
            Engine(run).train()


def open_run(
    config: ResolvedConfig,
    world: WorldInfo,
    callbacks: Sequence[Callback],
    stack: ExitStack,
    is_short: bool = False,
) -> Run | None:
    """Launch the processes, prepare data, build the model and resume. None if the run is finished or a dry run.

    Args:
        callbacks: The user's callbacks; they run after checks and throughput, before logging.
        stack: Closes what the run has opened.
        is_short: See :class:`toolkit.training.launch.Launch`.
    """
    if is_alone(config) and world.global_rank > 0:
        return None  # a launcher started it, and the first process prints
    launch = launch_run(config, world, stack, is_short)
    sampler = None
    new_tokens = launch.args.eval.max_new_tokens
    if new_tokens and not (new_tokens == AUTO and launch.args.objective.makes_batches):
        from toolkit.training.callbacks.samples import make_sampler  # with all of generation

        sampler = make_sampler(launch.data, launch.spec.config, new_tokens)
    if launch.is_finished:
        finish_run(launch, stack)
        return None
    device = None if is_alone(config) else launch.fabric.device
    launch = replace(launch, config=resolve_compiler(launch.config, device))
    if is_alone(config):
        _report_dry_run(launch, build_reader(launch, stack))
        return None
    made = {} if launch.is_short else make_callbacks(launch, stack)
    launch = replace(launch, data=launch.args.objective.prepare(launch))
    display = launch.display
    reader = build_reader(launch, stack)
    display.total_steps = launch.limits.total_steps
    display.phase("building the model")
    # not earlier: a smaller micro-batch does not save memory in data preparation
    stack.enter_context(oom_advice(launch.config))
    for line in describe_run(launch, reader):
        display.message(line)
    objective, model = build_models(launch)
    checkpointer = build_checkpointer(launch, model)
    optimizer: Any = launch.fabric.setup_optimizers(checkpointer.optimizer)
    if launch.args.dry_run:
        _report_dry_run(launch, reader)
        return None
    if checkpointer.sharded and not launch.is_short:
        checkpointer.leaders = disk_leaders(launch.out_dir, world.local_rank == 0, launch.remote is not None)
    added = with_checkpointer(made, checkpointer)
    leaders = checkpointer.leaders
    all_callbacks = build_callbacks(launch, objective, model, reader.order, callbacks, sampler, stack, leaders, added)
    if launch.resume_from is not None:
        load_callback_states(all_callbacks, launch.saved_callback_states, display.message)
    callback_states(all_callbacks)  # fail now if a state cannot be saved
    disable_malloc_trim(launch.config.device)  # after loading, so that memory freed by loading is returned (M3)
    tokenizer = launch.data.tokenizer
    return Run(
        **vars(launch),
        callbacks=all_callbacks,
        reader=reader,
        token_bytes=None if tokenizer is None else tokenizer.token_bytes(),
        objective=objective,
        model=model,
        checkpointer=checkpointer,
        optimizer=optimizer,
    )


def _report_dry_run(launch: Launch, reader: DataReader) -> None:
    require_single("planner", "--dry_run true").report_dry_run(launch, reader)


class Engine:
    """The training loop of a run."""

    def __init__(self, run: Run) -> None:
        self.run, self.update = run, build_update(run)
        self.is_late = reads_late(run, self.update)
        self.clock = Clock(is_on_device=self.is_late and run.fabric.device.type == "cuda")
        self.unread = deque[LaunchedStep]()
        self.intervals = build_intervals(run.args.train, run.args.eval, run.limits)
        self.signals, self.control_files = SignalWatch(), ControlFiles(run.out_dir)

    def train(self) -> None:
        """Train until a limit is reached, and write ``final/``."""
        run = self.run
        try:
            run.notify("on_train_start")
            with self.signals, run.garbage:
                if run.args.eval.initial_validation and run.resume_from is None:
                    metrics = run.validate()
                    self._log(metrics)
                    run.notify("on_validation_end", metrics)
                self._loop()
                run.save(FINAL)  # inside SignalWatch, so that a signal does not interrupt the final save
        except BaseException as error:
            ranks.set_timeout(run.timeouts.first)  # loggers may need long to upload
            if ranks.world_size() == 1:
                with suppress(Exception):
                    self._read_steps(0)  # so that the weights are of the step that callbacks see
            self._finish_save()
            self._notify_exception(error)
            raise
        ranks.set_timeout(run.timeouts.first)
        run.notify("on_train_end")

    def _loop(self) -> None:
        """Run optimizer steps until a limit is reached; validate, log and save when due."""
        run, progress = self.run, self.run.progress
        if run.limits.reached(progress.step, progress.tokens, progress.seconds):
            return
        # When this rank last left a collective: its work until the next one delays all ranks.
        self.ready_at = self.saved_at = self.validated_at = time.perf_counter()
        self.pause_seconds, self.step_seconds, self.first_step = 0.0, 0.0, progress.step + 1
        run.model.train()
        run.display.phase("training")
        while True:
            started_at, start = time.perf_counter(), self.clock.note()
            with record_function(DATA_WAIT):
                micro_batches = run.reader.read()
            read_at = time.perf_counter()
            micro_batches = run.begin_step(micro_batches)
            totals, microseconds = self._all_reduce_step(micro_batches, started_at, read_at)
            if not totals["writing"] and run.checkpointer.pending is not None:
                self.synced_at = time.perf_counter()
                self._read_steps(0)
                run.finish_save()
            self.synced_at = time.perf_counter()
            if self._stops_before_step(totals):
                return
            step = self._launch(micro_batches, totals, microseconds, started_at, start)
            self._read_steps(int(step.is_read_late))
            if step.is_last:
                return

    def _all_reduce_step(
        self, micro_batches: list[Batch], started_at: float, read_at: float
    ) -> tuple[dict[str, int], list[list[int]]]:
        """Sum counts and flags over all ranks, in one all-reduce per step.

        Returns:
            The sums by name, and for each rank the microseconds of host work since the last step and of waiting for
            data.
        """
        counted = micro_batches if ranks.is_first("pipeline", "context", "tensor") else []  # the others read the same
        run, limits = self.run, self.run.limits
        seconds_left = min(
            (limits.max_seconds or math.inf) - (started_at - run.launched_at),
            (limits.total_seconds or math.inf) - run.progress.seconds,
        )
        return ranks.all_reduce_and_gather(
            [round(1e6 * (time.perf_counter() - self.ready_at)), round(1e6 * (read_at - started_at))],
            **{f"normalizer {name}": n for name, n in total_counts(run.objective, counted).items()},
            n_inputs=sum(batch.n_inputs for batch in counted),
            signalled=int(self.signals.received > 0),
            should_stop=int(run.stop_reason is not None),
            cannot_read=int(run.reader.error is not None),
            writing=int(run.checkpointer.is_writing),
            time_is_up=int(seconds_left <= self.step_seconds),
            time_is_near=int(seconds_left <= (3 * self.step_seconds or sys.float_info.max)),  # decide by times as read
            microseconds=round(1e6 * run.progress.seconds) if ranks.global_rank() == 0 else 0,  # for the schedule
            eval_is_due=int(
                started_at - self.validated_at >= max(self.intervals.eval_seconds or math.inf, self.pause_seconds)
            ),
            save_is_due=int(started_at - self.saved_at >= (self.intervals.save_seconds or math.inf)),
            **self.control_files.look(),
        )

    def _stops_before_step(self, totals: dict[str, int]) -> bool:
        """Whether a callback requested a stop. Raises after a signal, a read error or a file STOP."""
        run = self.run
        if not any(totals[flag] for flag in ("signalled", "cannot_read", STOP, "should_stop")):
            return False
        self._read_steps(0)  # what is saved is checked
        if totals["signalled"]:
            signal_number = max(ranks.all_gather_object(self.signals.received))
            message = self._save_early()  # a second Ctrl-C interrupts its wait
            self.signals.ignore()
            raise StoppedBySignalError(signal_number, message)
        if totals["cannot_read"]:
            is_first = run.progress.step + 1 == self.first_step
            run.reader.raise_error(None if is_first else self._save_early())
        if totals[STOP]:
            message = self._save_early()
            self.control_files.remove(STOP)
            raise StoppedByFileError(message)
        reason = run.stop_reason or "requested by another rank"
        run.display.message(f"stopping after step {run.progress.step}: {reason}")
        return True

    def _save_early(self) -> str:
        """Save and upload before the run stops. Collective."""
        saved = self.run.save_step()
        for upload in uploads(self.run.callbacks):
            upload.wait()
        return f"stopped after step {self.run.progress.step}{saved}"

    def _launch(
        self,
        micro_batches: list[Batch],
        totals: dict[str, int],
        microseconds: list[list[int]],
        started_at: float,
        start: Any,
    ) -> LaunchedStep:
        """Launch the next step, and decide what is due after it."""
        run, args = self.run, self.run.args
        step = run.progress.step + len(self.unread) + 1
        tokens = run.progress.tokens + sum(before.totals["n_inputs"] for before in self.unread) + totals["n_inputs"]
        is_time_up = totals["time_is_up"] > 0
        seconds = math.inf if is_time_up else totals["microseconds"] / 1e6  # the last step ends the schedule
        learning_rate = run.schedule.learning_rate(step - 1, seconds)
        set_learning_rate(run.optimizer, learning_rate)
        counts = {name: totals[f"normalizer {name}"] for name in run.objective.normalizers}
        hooks = partial(run.garbage.collect, is_full=False), run.reader.prefetcher.start_read
        result = launch_step(run.objective, self.update, micro_batches, counts, *hooks)
        if self.is_late:
            assert isinstance(self.update, FusedUpdate)
            run.checkpointer.evaluation_weights.update(self.update.fault)
        is_last = run.limits.reached(step, tokens) or is_time_up
        is_eval_due = is_due(self.intervals.eval_steps, step) or totals["eval_is_due"] > 0
        validates = args.eval.final_validation if is_last else is_eval_due
        saves = is_due(self.intervals.save_steps, step) or totals["save_is_due"] or totals[SAVE_NOW]
        saves = bool(saves) and not is_last
        waits = step == self.first_step or is_last or validates or saves or totals["time_is_near"]
        is_read_late = self.is_late and not waits
        start = self.unread[-1].end if self.unread else start
        launched = LaunchedStep(
            totals, microseconds, learning_rate, result, started_at, start, self.clock.note(),
            is_last, validates, saves, is_read_late,
        )  # fmt: skip
        if is_read_late and not self.unread:  # no step is read now
            self.ready_at = time.perf_counter()
            launched.seconds = self.ready_at - self.synced_at
        self.unread.append(launched)
        return launched

    def _read_steps(self, n_left: int) -> None:
        """Read the results of the launched steps but the last ``n_left``: advance, validate, log and save when due."""
        while len(self.unread) > n_left:
            self._finish_step(self.unread.popleft())

    def _finish_step(self, step: LaunchedStep) -> None:
        run, progress, limits = self.run, self.run.progress, self.run.limits
        try:
            result = step.result()
        except GuardError as error:
            self.unread.clear()  # they changed nothing
            self._finish_save(is_on_all_ranks=True)
            raise GuardError(
                f"step {progress.step + 1} is not finite: {error}. No checkpoint includes this step; "
                "lower --train.learning_rate or inspect these samples (see troubleshooting: diverging)"
            ) from None
        if not self.is_late and not result.skipped:
            run.checkpointer.evaluation_weights.update()
        run.count_skipped(result)
        self.ready_at, n_inputs = time.perf_counter(), step.totals["n_inputs"]
        seconds = self.clock.seconds(step.start, step.end) if self.is_late else self.ready_at - step.started_at
        run.advance(n_inputs, seconds)
        run.step_times.add(step.microseconds, step.seconds + self.ready_at - self.synced_at)
        self.synced_at = self.ready_at
        metrics = {"loss": result.loss, "learning_rate": step.learning_rate, "grad_norm": result.grad_norm}
        metrics |= result.parts
        run.notify("on_step_end", metrics | {"step_tokens": n_inputs, "step_seconds": seconds})
        if progress.step == self.first_step:
            ranks.set_timeout(run.timeouts.later)
            seconds = 0.0  # the next step will not compile
        self.step_seconds = seconds
        if step.totals["time_is_up"] and limits.total_seconds is not None:
            progress.seconds = max(progress.seconds, limits.total_seconds)  # the run is finished
        self._after_step(step, metrics)

    def _after_step(self, step: LaunchedStep, metrics: Metrics) -> None:
        """Validate, log and save when due."""
        run, totals = self.run, step.totals
        started_at = time.perf_counter()
        validation = run.validate() if step.validates else {}
        if is_due(run.args.train.log_interval, run.progress.step) or step.is_last or validation:
            self._log(metrics | validation)
        if step.validates:
            run.notify("on_validation_end", validation)
            run.garbage.collect()
            self.ready_at = self.validated_at = time.perf_counter()
            self.pause_seconds = N_VALIDATIONS * (self.validated_at - started_at)  # at most a tenth of the time
        if step.saves:
            run.start_save(run.step_name)
            run.garbage.collect()
            self.ready_at = self.saved_at = time.perf_counter()
        if totals[SAVE_NOW]:
            self.control_files.remove(SAVE_NOW)

    def _log(self, metrics: Metrics) -> None:
        """Pass a row of metrics to the callbacks."""
        if metrics:
            run, progress = self.run, self.run.progress
            progress.logged_rows += 1
            axes = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
            run.notify("on_log", axes | metrics)

    def _notify_exception(self, error: BaseException) -> None:
        """Call ``on_exception`` of each callback. Failures only warn, because ``error`` already ends the run."""
        for callback in self.run.callbacks:
            try:
                callback.on_exception(self.run, error)
            except Exception as second:
                name = type(callback).__qualname__
                warnings.warn(f"callback {name} failed in on_exception: {second}", stacklevel=2)

    def _finish_save(self, is_on_all_ranks: bool = False) -> None:
        """Complete the save in progress, if possible, when an error ends the run: the saved state was finite.

        After an error on one rank, the other ranks may have exited, so rank 0 completes it alone.
        """
        run = self.run
        try:
            if is_on_all_ranks or ranks.world_size() == 1:
                run.finish_save()
            elif (folder := run.checkpointer.finish_alone()) is not None:
                run.display.message(f"saved {run.address(folder)}")
                for upload in uploads(run.callbacks):
                    if upload.uploader is not None:
                        upload.uploader.submit(folder)
        except Exception as second:  # report the first error, which ended the run
            run.display.message(f"note: the save in progress failed as well: {one_line(second)}")
        finally:
            run.checkpointer.pending = None  # it is tried once
