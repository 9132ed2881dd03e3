"""The run as callbacks see it, and the interface of callbacks."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from torch import Tensor
from torch.profiler import record_function

from toolkit.data.base import Report, State, row_count
from toolkit.data.batch import Batch
from toolkit.distributed import ranks
from toolkit.distributed.private_lightning import FabricModule
from toolkit.errors import CallbackError, CommandError, GuardError, UserError
from toolkit.objectives.base import Objective
from toolkit.planning.best_metric import VAL
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.data_reader import DataReader
from toolkit.training.garbage import GarbageCollection
from toolkit.training.launch import Launch
from toolkit.training.step import StepResult
from toolkit.training.throughput import StepTimes
from toolkit.training.time_breakdown import BEGIN_STEP, VALIDATE
from toolkit.training.validate import batches_by_source, validate

Hook = TypeVar("Hook", bound=Callable[..., None])
Metrics = dict[str, float]
"""Metrics by column of metrics.csv."""


class Callback:
    """Base class of callbacks. Override the hooks you need; the defaults do nothing.

    Every rank calls every hook at the same step, so a callback may use collectives. Metrics are plain numbers, the same
    on every rank. The order within a step: ``on_before_optimizer_step``, ``on_step_end``, validation if due
    (``validation_metrics``), ``on_log``, ``on_validation_end``, ``on_checkpoint_saved``. User callbacks run in the
    order given, after the run's checks and before its outputs.

    ``trainer`` is the :class:`Run`: ``model``, ``optimizer``, ``fabric``, ``data``, ``progress`` (``step``, ``tokens``,
    ``samples``), ``config``, ``args``, ``out_dir``, ``display``, ``callbacks``, ``save(name)``, ``validate()`` and
    ``request_stop(reason)``.
    """

    columns: tuple[str, ...] = ()
    """Names that ``on_log`` adds to the metrics. They become additional columns of metrics.csv."""

    higher_is_better: bool | dict[str, bool | None] | None = None
    """Whether the highest value of a metric is the best one, for ``--eval.best_by``; for several columns, by name."""

    def on_train_start(self, trainer: Run) -> None:
        """Called before the first step of this launch. Weights and (on resume) state are loaded."""

    def on_before_optimizer_step(self, trainer: Run) -> None:
        """Called after the backward pass. Parameters of ``trainer.model`` hold the global batch's gradient, checked and
        clipped (not yet clipped with bf16-master)."""

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        """Called after an optimizer step. Metrics: loss (nats per token), learning_rate, grad_norm, step_tokens
        (input tokens over all ranks), step_seconds."""

    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        """Called when metrics are logged: every ``--train.log_interval`` steps and with every validation. There is no
        ``loss`` before the first step. Later callbacks see what this callback adds to ``metrics``."""

    def validation_metrics(self, trainer: Run) -> Metrics:
        """Return further metrics of a validation, the same on every rank. Their names start with ``val_`` and are in
        ``columns``; ``NAME_stderr`` is the standard error of ``NAME``. Called in ``trainer.validate()`` after the
        validation loss, also without validation data. Weights must not change."""
        return {}

    def on_validation_end(self, trainer: Run, metrics: Metrics) -> None:
        """Called after a validation. Metrics: val_loss (nats per token), val_ppl and, with a tokenizer, val_bpb, unless
        there is no validation data, and what ``validation_metrics`` returned."""

    def on_checkpoint_saved(self, trainer: Run, folder: Path) -> None:
        """Called after a checkpoint is complete on disk; with ``--train.async_save``, some steps after it was taken."""

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        """Called when the run ends with an error or after a signal. With several ranks, the weights may be those after
        the next step then."""

    def on_train_end(self, trainer: Run) -> None:
        """Called when the run has finished and ``final/`` is complete."""

    def state_dict(self) -> State:
        """Return the state to save in every checkpoint: tensors and plain values, the same on every rank."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restore the state of the checkpoint that the run resumes from, before ``on_train_start``."""


def late(hook: Hook) -> Hook:
    """Let ``on_step_end`` or ``on_log`` of a step be called after the next step is launched.

    The hook sees the progress and the metrics of its step, and must not use the weights, except after the first step of
    a launch. With any other such hook in a run, the host waits for each step.
    """
    hook.may_be_late = True  # type: ignore[attr-defined]
    return hook


@dataclass(eq=False)
class Run(Launch):
    """A run that is built and ready to train.

    Args:
        callbacks: All callbacks in order.
        token_bytes: Number of UTF-8 bytes per token; None without a tokenizer.
        objective: The objective of the options, with its frozen model.
        optimizer: The optimizer as Fabric wraps it.
        skipped_steps: Steps in this launch without an update, because of the fp16 GradScaler or a spike.
        stop_reason: Why to stop before the next step; None to go on.
        last_saved: The latest checkpoint of this launch.
    """

    callbacks: list[Callback]
    reader: DataReader
    token_bytes: np.ndarray | None
    objective: Objective
    model: FabricModule
    checkpointer: Checkpointer
    optimizer: Any
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    stop_reason: str | None = None
    last_saved: Path | None = None
    step_times: StepTimes = field(default_factory=StepTimes)
    garbage: GarbageCollection = field(default_factory=GarbageCollection)

    @property
    def run(self) -> Run:
        """Deprecated: the run itself."""
        text = "trainer.run and trainer.state are the trainer itself: remove .run or .state; .state.model is .spec"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return self

    state = run

    def request_stop(self, reason: str) -> None:
        """Stop the run before the next step and write ``final/``. One rank may call this alone."""
        self.stop_reason = reason

    def notify(self, hook: str, *args: Any) -> None:
        """Call a hook of each callback in order. A failure raises a CallbackError that names callback and hook."""
        for callback in self.callbacks:
            _call(callback, hook, self, *args)

    def validate(self) -> Metrics:
        """Return the validation metrics (N6), the callbacks' included. Collective.

        Raises:
            GuardError: the loss is not finite.
        """
        self.display.phase("validating")
        with self.evaluation_weights():
            metrics = self._validation_loss()
            for callback in self.callbacks:
                for name, value in _call(callback, "validation_metrics", self).items():
                    if name not in callback.columns or not name.startswith(VAL):
                        owner = f"callback {type(callback).__qualname__}: validation_metrics returns {name!r:.50}"
                        raise CallbackError(f"{owner}; names must start with {VAL} and be in the callback's columns")
                    metrics[name] = value
        self.display.phase("training")
        return metrics

    def begin_step(self, micro_batches: list[Batch]) -> list[Batch]:
        """Return the micro-batches of a step, or of a validation, as the objective makes them. Collective.

        Raises:
            UserError: The objective raised it on every rank; the state after the last step is saved.
        """
        if not self.objective.makes_batches:
            return micro_batches
        try:
            with record_function(BEGIN_STEP):
                return self.objective.begin_step(self.model, micro_batches)
        except UserError as error:
            if not self.progress.step:
                raise
            raise type(error)(f"{error}{self.save_step()}") from error
        finally:
            self.display.phase("training" if self.model.training else "validating")

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights of checkpoints, such as the average of --train.ema.

        ``validation_metrics`` is called in it.
        """
        return self.checkpointer.evaluation_weights.active()

    def _validation_loss(self) -> Metrics:
        """Return the metrics of the objective; empty without validation data."""
        data, batch, max_iters = self.data, self.config.batch, self.args.eval.max_iters
        if data.val is None or not row_count(data.val):
            return {}
        self.reader.prefetcher.pause()  # validation and training rows may share a store
        read = partial(
            batches_by_source,
            data.val_sources or {"": data.val},
            None if max_iters is None else max_iters * batch.global_batch_size,
            micro_batch_size=batch.micro_batch_size,
            rank=ranks.layout().data_rank(ranks.global_rank()),
            world_size=ranks.layout().data_parallel,
            padding=self.reader.padding,
            count=self.objective.count,
            added_bos=data.added_bos,
        )
        with record_function(VALIDATE):
            batches: dict[str, Iterable[Batch]] = {**read()}
            if self.objective.makes_batches or self.objective.looks_ahead:
                self.model.eval()
                if self.objective.makes_batches:
                    batches = {name: self.begin_step(list(b)) for name, b in batches.items()}
                if self.objective.looks_ahead:
                    self.objective.look_ahead(self.model, chain(*read().values()), self.fabric.device)
                self.model.train()
            metrics = validate(self.fabric, self.objective, self.model, batches, self.token_bytes)
        if not math.isfinite(metrics.get("val_loss", 0.0)):
            raise GuardError(
                f"the validation loss after step {self.progress.step} is {metrics['val_loss']}: weights contain "
                "NaN or Inf; no checkpoint was saved; lower --train.learning_rate and resume with --resume auto "
                "(see troubleshooting: diverging)"
            )
        return metrics

    def save(self, name: str) -> Path:
        """Write the checkpoint ``out_dir/name`` (S1). Collective.

        Raises:
            GuardError: weights or optimizer state are not finite.
        """
        if self.is_short:
            return self.out_dir / name
        self.finish_save()
        folder = self.checkpointer.save(name, self._callback_states)
        self._announce(folder)
        return folder

    def save_step(self) -> str:
        """Save the state after this step, and return the end of a message that says so. Collective."""
        self.finish_save()
        folder = self.last_saved
        if folder is None or folder.name != self.step_name:  # a signal may come while the step is saved
            folder = self.save(self.step_name)
        return "" if self.is_short else f"; {self.address(folder)} is saved; resume with --resume auto"

    @property
    def step_name(self) -> str:
        return f"step-{self.progress.step:08d}"

    def save_checkpoint(self, path: Any = None, **options: Any) -> None:
        """Raise UserError with the alternative to this method of other trainers."""
        raise UserError(
            "save_checkpoint: fit saves automatically; in a callback use trainer.save(name), and for shards "
            "fsdp={'state_dict_type': 'sharded'}"
        )

    def start_save(self, name: str) -> None:
        """Save ``out_dir/name``. With ``--train.async_save`` return before the files are written. Collective."""
        if not self.args.train.async_save:
            self.save(name)
            return
        self.finish_save()
        self.checkpointer.start(name, self._callback_states)

    def finish_save(self) -> None:
        """Complete the save in progress, if there is one. Collective."""
        if (folder := self.checkpointer.finish()) is not None:
            self._announce(folder)

    def _callback_states(self) -> State:
        """Return the callbacks' states, and update the progress field that only checkpoints need."""
        self.progress.data = self.reader.state(self.progress.samples)
        return callback_states(self.callbacks)

    def _announce(self, folder: Path) -> None:
        self.last_saved = folder
        self.notify("on_checkpoint_saved", folder)
        self.display.phase("training")

    def advance(self, n_inputs: int, seconds: float) -> None:
        """Advance the progress by one step of ``n_inputs`` input tokens (all ranks)."""
        progress, total = self.progress, self.limits.total_samples
        progress.step += 1
        progress.tokens += n_inputs
        progress.seconds += seconds
        progress.samples += self.config.batch.global_batch_size
        if total is not None:
            progress.samples = min(progress.samples, total)  # the last batch of an epoch may be short

    def count_skipped(self, result: StepResult) -> None:
        """Count skipped steps. Raises GuardError after more than ``--train.max_skipped`` in a row."""
        self.skipped_steps += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row <= self.args.train.max_skipped:
            return
        step, times = f"step {self.progress.step + 1}", f"in {self.skipped_in_a_row} steps"
        if math.isfinite(result.grad_norm):
            raise GuardError(
                f"{step}: skipped as a spike of the loss or the gradient norm, as all {times} (--train.max_skipped); "
                "lower --train.learning_rate, or raise --train.skip_spikes (see troubleshooting: diverging)"
            )
        raise GuardError(
            f"{step}: no fp16 loss scale gave a finite gradient {times}; lower --train.learning_rate, or use "
            "--precision bf16-mixed or 32-true (see troubleshooting: diverging)"
        )


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback overrides a hook."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def _call(callback: Callback, hook: str, *args: Any) -> Any:
    try:
        return getattr(callback, hook)(*args)
    except CommandError:
        raise
    except Exception as error:
        name = type(callback).__qualname__
        raise CallbackError(f"callback {name} failed in {hook}: {type(error).__name__}: {error}") from error


def callback_states(callbacks: Iterable[Callback]) -> State:
    """Return the callback states that are not empty, by name."""
    states = {name: _call(callback, "state_dict") for name, callback in _by_name(callbacks).items()}
    for name, state in states.items():
        if not isinstance(state, dict):
            raise CallbackError(f"callback {name}: state_dict() returns a {type(state).__name__}, not a dictionary")
        for key, value in state.items():
            if (wrong := _find_unsafe_type([key, value])) is not None:
                raise CallbackError(
                    f"callback {name}: state_dict()[{key!r:.100}] contains the type {wrong}, which a checkpoint cannot "
                    "hold; convert it to a tensor, number, string, list or dict"
                )
    return {name: state for name, state in states.items() if state}


def load_callback_states(callbacks: Iterable[Callback], states: State, report: Report) -> None:
    """Restore callback states; report callbacks without a state and states without a callback."""
    by_name = _by_name(callbacks)
    for name, callback in by_name.items():
        if name in states:
            _call(callback, "load_state_dict", states[name])
        elif overrides(callback, "load_state_dict"):
            report(f"callback {name}: the checkpoint has no state for this callback; it starts from its initial state")
    for name in states.keys() - by_name.keys():
        report(f"callback {name}: ignored its state in the checkpoint, because the run has no such callback")


def _by_name(callbacks: Iterable[Callback]) -> dict[str, Callback]:
    """Return callbacks by class name. A second callback of the same class is ``NAME 2``."""
    named: dict[str, Callback] = {}
    counts = Counter[str]()
    for callback in callbacks:
        counts[name := type(callback).__qualname__] += 1
        named[f"{name} {counts[name]}" if name in named else name] = callback
    return named


def _find_unsafe_type(value: Any) -> str | None:
    """Return the first type that ``torch.load(weights_only=True)`` would reject, or None."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return next((wrong for part in value if (wrong := _find_unsafe_type(part)) is not None), None)
    return None if type(value) in (str, int, float, bool, NoneType, Tensor) else type(value).__name__
