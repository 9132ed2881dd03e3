"""Run training from arguments to ``final/``. Start reading at :meth:`Trainer.start`."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from torch.profiler import record_function

from toolkit.checkpoints.store import FINAL, newest
from toolkit.data.base import PreparedData, row_count
from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.memory import disable_malloc_trim
from toolkit.distributed.private_lightning import FabricModule
from toolkit.distributed.signals import SignalWatch
from toolkit.distributed.world import WorldInfo
from toolkit.errors import GuardError, StoppedByFileError, StoppedBySignalError, UserError
from toolkit.objectives.base import total_counts
from toolkit.optim.update import set_learning_rate
from toolkit.planning.limits import Intervals, Progress, build_intervals, is_due
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import RunArgs
from toolkit.training.build import build_callbacks, build_reader, build_run, build_update, finish_run, launch_run
from toolkit.training.callbacks import Callback, notify, notify_exception
from toolkit.training.callbacks.base import callback_states, load_callback_states
from toolkit.training.callbacks.upload import finish_uploads
from toolkit.training.control_files import SAVE_NOW, STOP
from toolkit.training.dry_run import report_dry_run
from toolkit.training.pipeline_step import pipeline_step
from toolkit.training.python_args import TrainResult, names_arguments, read_run_args, run_from_python
from toolkit.training.rank_consistency import require_shared_disk
from toolkit.training.run import Run, is_alone, resolve_run
from toolkit.training.saving import Saver
from toolkit.training.step import StepResult, train_step
from toolkit.training.trace import DATA_WAIT
from toolkit.training.trainer_names import PYTHON_OBJECTS, extract_dataset, translate
from toolkit.training.validate import validate_run


class Trainer:
    """A training run with the arguments of :func:`toolkit.train`. Callbacks get it as ``trainer``.

    Options of the group ``train`` may be keyword arguments, such as ``max_steps=100``. OpenLanguageModel's names also
    work: dataloader, device, context_length, grad_accum_steps, weight_decay, grad_clip_norm, sharding_strategy and
    others.

    Args:
        model: See :func:`toolkit.train`.
        dataset: See :func:`toolkit.train`. With ``grad_accum_steps``, a DataLoader determines the micro-batch size.
        val_dataset: Validation dataset.
        preset: "balanced", "memory" or "speed", see ``--preset``.
        strategy: "auto", "single", "ddp" or "fsdp".
        options: Options of the group ``train``, and all other arguments of :func:`toolkit.train`.

    Raises:
        UserError: an argument is unknown or set twice.
    """

    def __init__(
        self,
        model: Any = None,
        dataset: Any = None,
        *more: Any,
        val_dataset: Any = None,
        preset: str | None = None,
        strategy: str = "auto",
        **options: Any,
    ) -> None:
        dataset, options = extract_dataset((dataset, *more), options)
        self._objects = {"model": model, "dataset": dataset, "val_dataset": val_dataset}
        self._options = {"strategy": strategy, "preset": preset or "balanced"} | options
        self.result: TrainResult | None = None
        self.callbacks: list[Callback] = []
        self._run: Run | None = None
        translate(self._options, dataset)

    # ---- the run

    def fit(self, **limits: Any) -> TrainResult:
        """Train and return the result. ``limits`` are additional options, such as ``max_steps=100``.

        Raises:
            See :func:`toolkit.train`.
        """
        arguments = self.arguments(**limits)
        callbacks = arguments.pop("callbacks", ())
        objects = {name: arguments.pop(name) for name in PYTHON_OBJECTS if name in arguments}
        with names_arguments():
            args = read_run_args("pretrain", arguments, **objects)
            self.result = run_from_python(args, callbacks, lambda args, c: self.start(*resolve_run(args, c)))
        return self.result

    train = fit

    def save_checkpoint(self, path: Any = None, **options: Any) -> None:
        """Raise UserError with the alternative to this method of other trainers."""
        raise UserError(
            "save_checkpoint: fit saves automatically; in a callback use trainer.save(name), and for shards "
            "fsdp={'state_dict_type': 'sharded'}"
        )

    def arguments(self, **limits: Any) -> dict[str, Any]:
        """Return the arguments of :func:`toolkit.train` that are equivalent to ``fit(**limits)``."""
        for name in limits.keys() & self._options.keys():
            raise UserError(f"{name}: is already an argument of Trainer; remove one of them")
        return self._objects | translate(self._options | limits, self._objects["dataset"])

    def start(self, config: ResolvedConfig, world: WorldInfo, callbacks: Sequence[Callback] = ()) -> None:
        """Launch the processes, prepare data, build the model, resume, train, and write ``final/``.

        Every process of ``world`` calls this. ``callbacks`` run after checks and throughput, before logging.

        Raises:
            GuardError: the loss, the gradient or the weights are not finite, or replicas differ.
            StoppedBySignalError, StoppedByFileError: a signal or a file STOP stopped the run; the state has been saved.
            PeerLostError, PeerShutdownError: see :func:`toolkit.distributed.launch.launch_processes`.
            DataError: data could not be read during the run; the state has been saved.
            CallbackError: a callback failed.
        """
        with ExitStack() as stack:
            launch = launch_run(config, world, time.perf_counter(), self._resume_hint, stack)
            if launch.is_finished:
                finish_run(launch, stack)
                return
            if is_alone(launch.args):
                report_dry_run(launch, build_reader(launch, stack)[1])
                return
            self._run = run = build_run(launch, stack)
            if run.args.dry_run:
                report_dry_run(run, run.reader)
                return
            self.callbacks = self._build_callbacks(run, callbacks, stack)
            if run.state.resume_from is not None:
                load_callback_states(self.callbacks, run.state.callbacks, run.display.message)
            callback_states(self.callbacks)  # fail now if a state cannot be saved
            run.update, run.saver = build_update(self), Saver(self)
            if run.checkpointer.sharded:
                require_shared_disk(run.out_dir)
            disable_malloc_trim(run.config.device)  # after loading, so that memory freed by loading is returned (M3)
            self._train()

    def _train(self) -> None:
        try:
            notify(self.callbacks, "on_train_start", self)
            with SignalWatch() as signals, self.run.garbage:
                if self.args.eval.initial_validation and self.run.state.resume_from is None:
                    metrics = self.validate()
                    self._log(metrics)
                    notify(self.callbacks, "on_validation_end", self, metrics)
                self._loop(signals)
                self.save(FINAL)  # inside SignalWatch, so that a signal does not interrupt the final save
        except BaseException as error:
            ranks.set_timeout(self.run.timeouts.first)  # loggers may need long to upload
            self.run.saver.finish_after(error)
            notify_exception(self.callbacks, self, error)
            raise
        ranks.set_timeout(self.run.timeouts.first)
        notify(self.callbacks, "on_train_end", self)

    def _loop(self, signals: SignalWatch) -> None:
        """Run optimizer steps until a limit is reached; validate, log and save when due."""
        run, progress, limits = self.run, self.progress, self.run.state.limits
        if limits.reached(progress.step, progress.tokens):
            return
        intervals = build_intervals(self.args.train, self.args.eval, limits)
        run.ready_at = run.saved_at = run.validated_at = time.perf_counter()
        step_seconds, first_step = 0.0, progress.step + 1
        self.model.train()
        self.display.phase("training")
        while True:
            started_at = time.perf_counter()
            with record_function(DATA_WAIT):
                micro_batches = run.reader.read()
            totals, microseconds = self._all_reduce_step(micro_batches, signals, intervals, started_at, step_seconds)
            if not totals["writing"]:
                run.saver.finish()
            synced_at = time.perf_counter()
            if self._stops_before_step(totals, signals, is_first=progress.step + 1 == first_step):
                return

            learning_rate = run.state.schedule.learning_rate(progress.step)
            counts = {name: totals[f"normalizer {name}"] for name in run.objective.normalizers}
            result = self._step(micro_batches, counts, learning_rate)
            run.count_skipped(result)
            run.advance(totals["n_inputs"])
            run.ready_at = time.perf_counter()
            step_seconds = run.ready_at - started_at
            run.step_times.add(microseconds, run.ready_at - synced_at)
            metrics = {"loss": result.loss, "learning_rate": learning_rate, "grad_norm": result.grad_norm}
            metrics |= result.parts
            sizes = {"step_tokens": totals["n_inputs"], "step_seconds": step_seconds}
            notify(self.callbacks, "on_step_end", self, metrics | sizes)
            if progress.step == first_step:
                ranks.set_timeout(run.timeouts.later)
            is_last = limits.reached(progress.step, progress.tokens) or totals["time_is_up"] > 0
            self._after_step(metrics, totals, intervals, is_last)
            if is_last:
                return

    def _all_reduce_step(
        self,
        micro_batches: list[Batch],
        signals: SignalWatch,
        intervals: Intervals,
        started_at: float,
        step_seconds: float,
    ) -> tuple[dict[str, int], list[list[int]]]:
        """Sum counts and flags over all ranks, in one all-reduce per step.

        Returns:
            The sums by name, and for each rank the microseconds of host work since the last step and of waiting for
            data.
        """
        counted = micro_batches if ranks.is_first("pipeline", "context", "tensor") else []  # the others read the same
        run, data_ready_at, max_seconds = self.run, time.perf_counter(), self.run.state.limits.max_seconds
        seconds_left = math.inf if max_seconds is None else run.launched_at + max_seconds - started_at
        return ranks.all_reduce_and_gather(
            [round(1e6 * (data_ready_at - run.ready_at)), round(1e6 * (data_ready_at - started_at))],
            **{f"normalizer {name}": n for name, n in total_counts(run.objective, counted).items()},
            n_inputs=sum(batch.n_inputs for batch in counted),
            signalled=int(signals.received > 0),
            should_stop=int(run.stop_reason is not None),
            cannot_read=int(run.reader.error is not None),
            writing=int(run.saver.is_writing),
            time_is_up=int(seconds_left <= step_seconds),
            eval_is_due=int(started_at - run.validated_at >= (intervals.eval_seconds or math.inf)),
            save_is_due=int(started_at - run.saved_at >= (intervals.save_seconds or math.inf)),
            **run.control_files.look(),
        )

    def _stops_before_step(self, totals: dict[str, int], signals: SignalWatch, is_first: bool) -> bool:
        """Whether a callback requested a stop. Raises after a signal, a read error or a file STOP."""
        if totals["signalled"]:
            self._stop_for_signal(signals)
        if totals["cannot_read"]:
            self._stop_for_data(is_first)
        if totals[STOP]:
            self._stop_for_file()
        if totals["should_stop"]:
            reason = self.run.stop_reason or "requested by another rank"
            self.display.message(f"stopping after step {self.progress.step}: {reason}")
        return totals["should_stop"] > 0

    def _after_step(
        self, metrics: dict[str, float], totals: dict[str, int], intervals: Intervals, is_last: bool
    ) -> None:
        """Validate, log and save when due."""
        step, evaluation = self.progress.step, self.args.eval
        is_eval_due = is_due(intervals.eval_steps, step) or totals["eval_is_due"] > 0
        should_validate = evaluation.final_validation if is_last else is_eval_due
        validation = self.validate() if should_validate else {}
        if is_due(self.args.train.log_interval, step) or is_last or validation:
            self._log(metrics | validation)
        if should_validate:
            notify(self.callbacks, "on_validation_end", self, validation)
            self.run.garbage.collect()
            self.run.ready_at = self.run.validated_at = time.perf_counter()
        if not is_last and (is_due(intervals.save_steps, step) or totals["save_is_due"] or totals[SAVE_NOW]):
            self.run.saver.start(f"step-{step:08d}")
            self.run.garbage.collect()
            self.run.ready_at = self.run.saved_at = time.perf_counter()
        if totals[SAVE_NOW]:
            self.run.control_files.remove(SAVE_NOW)

    def _step(self, micro_batches: list[Batch], counts: dict[str, int], learning_rate: float) -> StepResult:
        run = self.run
        set_learning_rate(run.optimizer, learning_rate)
        try:
            step = train_step if self.config.strategy.layout.pipeline == 1 else pipeline_step
            result = step(run.fabric, run.objective, run.update, micro_batches, counts, run.overlap)
        except GuardError as error:
            run.saver.finish_after(error, is_on_all_ranks=True)
            raise GuardError(
                f"step {self.progress.step + 1} is not finite: {error}. No checkpoint includes this step; "
                "lower --train.learning_rate or inspect these samples (see troubleshooting: diverging)"
            ) from None
        return result

    # ---- interface for callbacks

    @property
    def run(self) -> Run:
        """The run's parts and progress. Available from ``on_train_start`` on."""
        if self._run is None:
            raise UserError("Trainer: the run has not started; call fit() first")
        return self._run

    @property
    def config(self) -> ResolvedConfig:
        return self.run.config

    @property
    def args(self) -> RunArgs:
        return self.run.args

    @property
    def out_dir(self) -> Path:
        return self.run.out_dir

    @property
    def display(self) -> Any:
        return self.run.display

    @property
    def fabric(self) -> Fabric:
        return self.run.fabric

    @property
    def data(self) -> PreparedData:
        return self.run.data

    @property
    def model(self) -> FabricModule:
        return self.run.model

    @property
    def optimizer(self) -> Any:
        """The optimizer as Fabric wraps it."""
        return self.run.optimizer

    @property
    def progress(self) -> Progress:
        return self.run.state.progress

    def save(self, name: str) -> Path:
        """Write the checkpoint ``out_dir/name`` (S1). Collective.

        Raises:
            GuardError: weights or optimizer state are not finite.
        """
        return self.run.saver.save(name)

    def validate(self) -> dict[str, float]:
        """Return the validation metrics (N6); empty without validation data. Collective.

        Raises:
            GuardError: the loss is not finite.
        """
        if self.data.val is None or not row_count(self.data.val):
            return {}
        self.display.phase("validating")
        metrics = validate_run(self.run)
        self.display.phase("training")
        return metrics

    def request_stop(self, reason: str) -> None:
        """Stop the run before the next step and write ``final/``. One rank may call this alone."""
        self.run.stop_reason = reason

    # ---- overridden by ShortRunTrainer

    def _build_callbacks(self, run: Run, user_callbacks: Sequence[Callback], stack: ExitStack) -> list[Callback]:
        return build_callbacks(run, user_callbacks, stack)

    def _resume_hint(self, out_dir: Path) -> str:
        return f"--resume auto continues from {newest(out_dir) or 'the newest checkpoint, if one was saved'}"

    # ---- helpers of the loop

    def _log(self, metrics: dict[str, float]) -> None:
        """Pass a row of metrics to the callbacks."""
        if metrics:
            self._count_seconds()
            self.progress.logged_rows += 1
            axes = {"step": self.progress.step, "tokens": self.progress.tokens, "seconds": self.progress.seconds}
            notify(self.callbacks, "on_log", self, axes | metrics)

    def update_progress(self) -> None:
        """Update the progress fields that only checkpoints need."""
        self._count_seconds()
        self.progress.data = self.run.reader.state(self.progress.samples)

    def _count_seconds(self) -> None:
        self.progress.seconds = self.run.seconds_before + time.perf_counter() - self.run.launched_at

    def _stop_for_signal(self, signals: SignalWatch) -> None:
        signal_number = max(ranks.all_gather_object(signals.received))
        message = self._save_early()
        finish_uploads(self.callbacks)  # a second Ctrl-C interrupts this wait
        signals.ignore()
        raise StoppedBySignalError(signal_number, message)

    def _stop_for_file(self) -> None:
        message = self._save_early()
        finish_uploads(self.callbacks)
        self.run.control_files.remove(STOP)
        raise StoppedByFileError(message)

    def _stop_for_data(self, is_first: bool) -> None:
        self.run.reader.raise_error(None if is_first else self._save_early())

    def _save_early(self) -> str:
        folder = self.save(f"step-{self.progress.step:08d}")
        return f"stopped after step {self.progress.step}; {folder} is saved; resume with --resume auto"


def run_training(args: RunArgs, callbacks: Sequence[Callback] = ()) -> None:
    """Train. Every process of the run calls this. ``callbacks`` run after ``--callbacks``."""
    Trainer().start(*resolve_run(args, callbacks))
