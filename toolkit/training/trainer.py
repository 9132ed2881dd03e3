"""One training run, from its resolved configuration to ``final/``: :meth:`Trainer.fit` reads from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.profiler import record_function

from toolkit.checkpoints.lock import require_unlocked
from toolkit.checkpoints.remote.run import RemoteRun
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import FINAL, newest
from toolkit.data.base import row_count
from toolkit.data.loader import Batch, choose_padding
from toolkit.distributed import ranks
from toolkit.distributed.device import deterministic_algorithms, fp32_reductions
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launch import Timeouts, launch_processes
from toolkit.distributed.memory import disable_malloc_trim
from toolkit.distributed.signals import SignalWatch
from toolkit.distributed.world import WorldInfo
from toolkit.errors import GuardError, StoppedBySignalError
from toolkit.io.paths import is_url
from toolkit.models.gpt import Block
from toolkit.optim.update import set_learning_rate
from toolkit.planning.advice import oom_advice
from toolkit.planning.limits import Intervals, build_intervals, is_due
from toolkit.planning.plan import require_memory
from toolkit.planning.resolve import ResolvedConfig
from toolkit.training.build import build_callbacks, build_checkpointer, build_update, prepare_model, upload_missing
from toolkit.training.callbacks import Callback, Sampler, notify, notify_exception
from toolkit.training.callbacks.base import callback_states, load_callback_states
from toolkit.training.callbacks.metrics import plot_run
from toolkit.training.callbacks.samples import make_sampler
from toolkit.training.callbacks.upload import finish_uploads
from toolkit.training.checkpoint_meta import read_meta
from toolkit.training.compiler import resolve_compiler
from toolkit.training.data import prepare_data
from toolkit.training.data_reader import DataReader
from toolkit.training.describe import describe_rounding, describe_run
from toolkit.training.garbage import GarbageCollection
from toolkit.training.rank_consistency import require_shared_disk
from toolkit.training.saving import Saver
from toolkit.training.start_state import keep_fused_qkv, prepare_start_state
from toolkit.training.step import MAX_SKIPPED_IN_A_ROW, StepResult, train_step
from toolkit.training.throughput import StepTimes
from toolkit.training.trace import DATA_WAIT, VALIDATE
from toolkit.training.validate import batches_by_source, validate
from toolkit.training.verify import fetch_on_other_nodes, find_intact
from toolkit.ui.console import make_progress


class Trainer:
    """One training run; every process of the run makes one.

    Args:
        config: From :func:`toolkit.planning.resolve.resolve`.
        world: The processes of the run.
        user_callbacks: Called after the checks and the throughput, before logging and samples, in this order.
    """

    def __init__(self, config: ResolvedConfig, world: WorldInfo, user_callbacks: Sequence[Callback] = ()) -> None:
        self.launched_at = time.perf_counter()  # --train.max_time counts from here
        self.config, self.args, self.world = config, config.args, world
        self.out_dir = config.args.run_dir
        self.remote = RemoteRun(config.args.out_dir, self.out_dir) if is_url(config.args.out_dir) else None
        self.display: Any = None
        self.timeouts = Timeouts.of(config.args.timeout)
        self.user_callbacks = list(user_callbacks)
        self.callbacks: list[Callback] = []
        self.skipped_steps = 0  # of this launch, by the fp16 scaler
        self.step_times = StepTimes()
        self.garbage = GarbageCollection()
        self.objective = config.args.objective
        self._stop_reason: str | None = None
        # the other ranks wait for what a rank does from _ready_at to its call of _agree
        self._ready_at = self._saved_at = self._validated_at = 0.0

    # ---- the run

    def fit(self) -> None:
        """Launch the processes, prepare data, build the model, resume, train, and write ``final/``.

        Raises:
            GuardError: the loss, the gradient or the weights are not finite, or replicas differ.
            StoppedBySignalError: a signal came; the state has been saved.
            PeerLostError, PeerShutdownError: see :func:`toolkit.distributed.launch.launch_processes`.
            DataError: data cannot be read in the midst of the run; the state has been saved.
            CallbackError: a callback failed.
        """
        args, config, world = self.args, self.config, self.world
        # a launcher without peers looks before it starts processes: no other process waits for it yet
        is_single_launcher = world.world_size == 1 or (world.starts_processes and world.num_nodes == 1)
        resume_from = self._find_resume() if is_single_launcher else None
        self.fabric = build_fabric(
            config.strategy,
            world,
            accelerator=config.device,
            precision=config.precision,
            fsdp=config.fsdp,
            ddp=args.ddp,
            block_classes=set(args.block_classes or (Block,)),
            groups=args.groups,
        )
        with ExitStack() as stack:
            group = stack.enter_context(launch_processes(self.fabric, world, self.timeouts))
            group.shutdown.resume_hint = self._resume_hint
            stack.enter_context(deterministic_algorithms(args.deterministic))
            stack.enter_context(fp32_reductions())
            self.display = stack.enter_context(make_progress(total_steps=None, enabled=world.global_rank == 0))
            if world.global_rank == 0 and not is_single_launcher:
                resume_from = self._find_resume()
            self.display.phase("preparing data")
            self.data = group.first_then_others(lambda: prepare_data(args, config.max_seq_length, self.display.message))
            group.init_process_group()
            fetch_on_other_nodes(self.remote, args.resume, resume_from, world)
            resume_from, damaged = find_intact(args, resume_from, world.local_rank == 0, self.display)
            self.config = config = keep_fused_qkv(config, resume_from)
            self.state = prepare_start_state(config, self.data, resume_from, damaged)
            sampler = make_sampler(self.data, self.state.model.config, args.eval.max_new_tokens)
            self.progress = self.state.progress
            self._seconds_before = self.progress.seconds  # of earlier launches
            if self.state.is_finished(args):
                self.display.message(
                    f"{resume_from} has reached step {self.progress.step}: the run is finished, nothing to do"
                )
                if world.global_rank == 0 and not (self.out_dir / "loss.png").exists():
                    plot_run(self.out_dir)  # killed before it was drawn
                if self.remote is not None:
                    upload_missing(self.remote, self, stack)
                return
            self.config = config = resolve_compiler(config, self.state, self.fabric.device)
            self.args = args = config.args
            context = None if self.state.model.config is None else config.max_seq_length
            self.padding = choose_padding(self.fabric.device.type, self.state.longest_ragged > 0, context)
            self.reader = DataReader(config, self.state, self.data.train, self.padding, self.fabric.device)
            stack.callback(self.reader.close)
            self.token_bytes = None if self.data.tokenizer is None else self.data.tokenizer.token_bytes()
            self.display.total_steps = self.state.limits.total_steps
            self.display.phase("building the model")
            stack.enter_context(oom_advice(config))
            for line in describe_run(config, self.state, self.reader):
                self.display.message(line)
            if (gpt := self.state.model.meta_model) is not None and args.optimizer_class is None:
                require_memory(config, gpt.config, gpt)
            self.model = prepare_model(config, self.state, self.fabric, self.display.message)
            if (note := describe_rounding(config, self.state, self.model)) is not None:
                self.display.message(note)
            self.checkpointer = build_checkpointer(
                config, self.state, self.fabric, self.model, self.data.tokenizer, self.display.message
            )
            if resume_from is not None:
                self.restore(resume_from)
            self.optimizer: Any = self.fabric.setup_optimizers(self.checkpointer.optimizer)
            self.callbacks = self._build_callbacks(sampler, stack)
            if resume_from is not None:
                load_callback_states(self.callbacks, self.state.callbacks, self.display.message)
            callback_states(self.callbacks)  # what cannot be saved is an error now
            self.update = build_update(self)
            self.saver = Saver(self, self.checkpointer)
            if self.checkpointer.sharded:
                require_shared_disk(self.out_dir)
            disable_malloc_trim(config.device)  # only now: what loading has freed is returned (M3)
            self._train()

    def _train(self) -> None:
        try:
            notify(self.callbacks, "on_train_start", self)
            with SignalWatch() as signals, self.garbage:
                if self.args.eval.initial_validation and self.state.resume_from is None:
                    metrics = self.validate()
                    self._log(metrics)
                    notify(self.callbacks, "on_validation_end", self, metrics)
                self._loop(signals)
                self.save(FINAL)  # still under the watch: a signal must not cut short the run's last save
        except BaseException as error:
            ranks.set_timeout(self.timeouts.first)  # a logger may have much to send
            self.saver.finish_after(error)
            notify_exception(self.callbacks, self, error)
            raise
        ranks.set_timeout(self.timeouts.first)
        notify(self.callbacks, "on_train_end", self)

    def _loop(self, signals: SignalWatch) -> None:
        """Run optimizer steps until a limit is reached, with what is due in between."""
        progress, limits = self.progress, self.state.limits
        if limits.reached(progress.step, progress.tokens):
            return
        intervals = build_intervals(self.args.train, self.args.eval, limits)
        self._ready_at = self._saved_at = self._validated_at = time.perf_counter()
        step_seconds, skipped_in_a_row, first_step = 0.0, 0, progress.step + 1
        self.model.train()
        self.display.phase("training")
        while True:
            started_at = time.perf_counter()
            with record_function(DATA_WAIT):
                micro_batches = self.reader.read()
            agreed, microseconds = self._agree(micro_batches, signals, intervals, started_at, step_seconds)
            if not agreed["writing"]:
                self.saver.finish()
            synced_at = time.perf_counter()
            if self._stops_before_step(agreed, signals, is_first=progress.step + 1 == first_step):
                return

            learning_rate = self.state.schedule.learning_rate(progress.step)
            counts = {name: agreed[f"n_{name}"] for name in self.objective.normalizers}
            result = self._step(micro_batches, counts, learning_rate)
            skipped_in_a_row = skipped_in_a_row + 1 if result.skipped else 0
            if skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
                raise GuardError(
                    f"step {progress.step + 1}: no fp16 loss scale gave a finite gradient in {skipped_in_a_row} steps"
                )
            self._advance(agreed["n_inputs"])
            self._ready_at = time.perf_counter()
            step_seconds = self._ready_at - started_at
            self.step_times.add(microseconds, self._ready_at - synced_at)
            metrics = {"loss": result.loss, "learning_rate": learning_rate, "grad_norm": result.grad_norm}
            metrics |= result.parts
            sizes = {"step_tokens": agreed["n_inputs"], "step_seconds": step_seconds}
            notify(self.callbacks, "on_step_end", self, metrics | sizes)
            if progress.step == first_step:
                ranks.set_timeout(self.timeouts.later)
            is_last = limits.reached(progress.step, progress.tokens) or agreed["time_is_up"] > 0
            self._after_step(metrics, agreed, intervals, is_last)
            if is_last:
                return

    def _agree(
        self,
        micro_batches: list[Batch],
        signals: SignalWatch,
        intervals: Intervals,
        started_at: float,
        step_seconds: float,
    ) -> tuple[dict[str, int], list[list[int]]]:
        """Sum over the ranks what they must agree on in this step: the step's one collective beside the gradient's.

        Returns:
            The sums by name, and for each rank its microseconds from the last step's end to this call, during which the
            other ranks waited, and those of them in which it waited for data.
        """
        data_ready_at, max_seconds = time.perf_counter(), self.state.limits.max_seconds
        seconds_left = math.inf if max_seconds is None else self.launched_at + max_seconds - started_at
        return ranks.all_reduce_and_gather(
            [round(1e6 * (data_ready_at - self._ready_at)), round(1e6 * (data_ready_at - started_at))],
            **{f"n_{name}": sum(batch.counts[name] for batch in micro_batches) for name in self.objective.normalizers},
            n_inputs=sum(batch.n_inputs for batch in micro_batches),
            signalled=int(signals.received > 0),
            should_stop=int(self._stop_reason is not None),
            cannot_read=int(self.reader.error is not None),
            writing=int(self.saver.is_writing),
            time_is_up=int(seconds_left <= step_seconds),
            eval_is_due=int(started_at - self._validated_at >= (intervals.eval_seconds or math.inf)),
            save_is_due=int(started_at - self._saved_at >= (intervals.save_seconds or math.inf)),
        )

    def _stops_before_step(self, agreed: dict[str, int], signals: SignalWatch, is_first: bool) -> bool:
        """Whether a callback has requested the end; after a signal, or where data cannot be read, raise."""
        if agreed["signalled"]:
            self._stop_for_signal(signals)
        if agreed["cannot_read"]:
            self._stop_for_data(is_first)
        if agreed["should_stop"]:
            reason = self._stop_reason or "requested by another rank"
            self.display.message(f"stopping after step {self.progress.step}: {reason}")
        return agreed["should_stop"] > 0

    def _after_step(
        self, metrics: dict[str, float], agreed: dict[str, int], intervals: Intervals, is_last: bool
    ) -> None:
        """Validate, log and save where it is due."""
        step, evaluation = self.progress.step, self.args.eval
        is_eval_due = is_due(intervals.eval_steps, step) or agreed["eval_is_due"] > 0
        should_validate = evaluation.final_validation if is_last else is_eval_due
        validation = self.validate() if should_validate else {}
        if is_due(self.args.train.log_interval, step) or is_last or validation:
            self._log(metrics | validation)
        if should_validate:
            notify(self.callbacks, "on_validation_end", self, validation)
            self.garbage.collect()
            self._ready_at = self._validated_at = time.perf_counter()
        if not is_last and (is_due(intervals.save_steps, step) or agreed["save_is_due"]):
            self.saver.start(f"step-{step:08d}")
            self.garbage.collect()
            self._ready_at = self._saved_at = time.perf_counter()

    def _step(self, micro_batches: list[Batch], counts: dict[str, int], learning_rate: float) -> StepResult:
        set_learning_rate(self.optimizer, learning_rate)
        try:
            result = train_step(self.fabric, self.objective, self.update, micro_batches, counts, self._overlap)
        except GuardError as error:
            self.saver.finish_after(error, is_on_all_ranks=True)
            raise GuardError(
                f"step {self.progress.step + 1} is not finite: {error}. Nothing of it was saved; "
                "lower --train.learning_rate or look at these samples"
            ) from None
        self.skipped_steps += result.skipped
        return result

    def _overlap(self) -> None:
        """Host work while the device computes a step."""
        self.reader.copy_ahead()
        self.garbage.collect(is_due=False)

    def _advance(self, n_inputs: int) -> None:
        self.progress.step += 1
        self.progress.tokens += n_inputs
        self.progress.samples += self.config.batch.global_batch_size
        if (total := self.state.limits.total_samples) is not None:
            self.progress.samples = min(self.progress.samples, total)  # the last batch of an epoch may be short

    # ---- what callbacks may call

    def save(self, name: str) -> Path:
        """Write the checkpoint ``out_dir/name`` (S1); every rank calls this.

        Raises:
            GuardError: weights or optimizer state are not finite.
        """
        return self.saver.save(name)

    def validate(self) -> dict[str, float]:
        """Return the metrics of the held-out data (N6), nothing where there is none; every rank calls this.

        Raises:
            GuardError: the loss is not finite.
        """
        if self.data.val is None or not row_count(self.data.val):
            return {}
        self.display.phase("validating")
        self.reader.pause()  # held-out and training rows may be of one store
        batch, max_iters = self.config.batch, self.args.eval.max_iters
        batches = batches_by_source(
            self.data.val_sources or {"": self.data.val},
            None if max_iters is None else max_iters * batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            padding=self.padding,
            count=self.objective.count,
        )
        with record_function(VALIDATE):
            metrics = validate(self.fabric, self.objective, self.model, batches, self.token_bytes)
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            raise GuardError(
                f"the validation loss after step {self.progress.step} is {metrics['val_loss']}: weights contain "
                "NaN or Inf; no checkpoint was saved; lower --train.learning_rate and resume with --resume auto"
            )
        self.display.phase("training")
        return metrics

    def request_stop(self, reason: str) -> None:
        """End the run before the next step, with ``final/``. One rank that asks is enough."""
        self._stop_reason = reason

    def restore(self, folder: Path) -> None:
        """Restore optimizer, scaler and random states from a checkpoint; the model has its weights already."""
        self.checkpointer.restore(folder, self.progress.step)
        set_learning_rate(
            self.checkpointer.optimizer, self.state.schedule.learning_rate(max(self.progress.step - 1, 0))
        )
        self.display.message(f"resuming from {folder}: step {self.progress.step}, {self.progress.tokens:,} tokens")
        old, new = read_meta(folder)["schedule"], asdict(self.state.schedule)
        changes = [
            f"{name} {_short(old.get(name))} -> {_short(new[name])}" for name in new if old.get(name) != new[name]
        ]
        if changes:
            self.display.message(f"LR schedule changed on resume: {', '.join(changes)}")

    # ---- building

    def _build_callbacks(self, sampler: Sampler | None, stack: ExitStack) -> list[Callback]:
        return build_callbacks(self, sampler, self.user_callbacks, stack)

    def _find_resume(self) -> Path | None:
        require_unlocked(self.out_dir)
        if self.remote is not None:
            args, report = self.args, print if self.display is None else self.display.message
            keep_best = args.train.keep_best
            self.remote.prepare(args.resume, report, keep_best=keep_best, verify=args.verify_checkpoint)
        return resolve_resume(self.args.resume, self.out_dir)

    def _resume_hint(self) -> str:
        return f"--resume auto continues from {newest(self.out_dir) or 'the newest checkpoint, if one was saved'}"

    # ---- parts of the loop

    def _log(self, metrics: dict[str, float]) -> None:
        """Hand a row of metrics to the callbacks."""
        if metrics:
            self._count_seconds()
            self.progress.logged_rows += 1
            axes = {"step": self.progress.step, "tokens": self.progress.tokens, "seconds": self.progress.seconds}
            notify(self.callbacks, "on_log", self, axes | metrics)

    def update_progress(self) -> None:
        """Bring up to date what of the progress only checkpoints need."""
        self._count_seconds()
        self.progress.data = self.reader.state(self.progress.samples)

    def _count_seconds(self) -> None:
        self.progress.seconds = self._seconds_before + time.perf_counter() - self.launched_at

    def _stop_for_signal(self, signals: SignalWatch) -> None:
        signal_number = max(ranks.all_gather_object(signals.received))
        folder = self.save(f"step-{self.progress.step:08d}")
        finish_uploads(self.callbacks, self)  # a second Ctrl-C ends the wait
        signals.ignore()
        raise StoppedBySignalError(
            signal_number, f"stopped after step {self.progress.step}; {folder} is saved; resume with --resume auto"
        )

    def _stop_for_data(self, is_first: bool) -> None:
        saved = None
        if not is_first:
            folder = self.save(f"step-{self.progress.step:08d}")
            saved = f"stopped after step {self.progress.step}; {folder} is saved; resume with --resume auto"
        self.reader.raise_error(saved)


def _short(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value
