"""Callback interface: hooks that the Trainer calls at fixed points of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from toolkit.errors import CallbackError, CommandError

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


class Callback:
    """Base class of callbacks. Override the hooks you need; the defaults do nothing.

    Every rank calls every hook at the same step, so a callback may use collectives. Metrics are plain numbers, the same
    on every rank. The order within a step: ``on_before_optimizer_step``, ``on_step_end``, validation if due,
    ``on_log``, ``on_validation_end``, ``on_checkpoint_saved``. User callbacks run in the order given, after the run's
    checks and before its outputs.

    ``trainer`` offers ``model``, ``optimizer``, ``fabric``, ``data``, ``progress`` (``step``, ``tokens``, ``samples``),
    ``config``, ``out_dir``, ``save(name)`` and ``request_stop(reason)``.
    """

    columns: tuple[str, ...] = ()
    """Names that ``on_log`` adds to the metrics. They become additional columns of metrics.csv."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Called before the first step of this launch. Weights and (on resume) state are loaded."""

    def on_before_optimizer_step(self, trainer: Trainer) -> None:
        """Called after the backward pass. Parameters of ``trainer.model`` hold the global batch's gradient, checked and
        clipped (not yet clipped with bf16-master)."""

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Called after an optimizer step. Metrics: loss (nats per token), learning_rate, grad_norm, step_tokens
        (input tokens over all ranks), step_seconds."""

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Called when metrics are logged: every ``--train.log_interval`` steps and with every validation. There is no
        ``loss`` before the first step. Later callbacks see what this callback adds to ``metrics``."""

    def on_validation_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Called after a validation. Metrics: val_loss (nats per token), val_ppl and, with a tokenizer, val_bpb; empty
        without validation data."""

    def on_checkpoint_saved(self, trainer: Trainer, folder: Path) -> None:
        """Called after a checkpoint is complete on disk; with ``--train.async_save``, some steps after it was taken."""

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called when the run ends with an error or after a signal."""

    def on_train_end(self, trainer: Trainer) -> None:
        """Called when the run has finished and ``final/`` is complete."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in every checkpoint: tensors and plain values, the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the checkpoint that the run resumes from, before ``on_train_start``."""


def overrides(callback: Callback, hook: str) -> bool:
    """Whether a callback overrides a hook."""
    return getattr(getattr(callback, hook), "__func__", None) is not getattr(Callback, hook)


def notify(callbacks: Iterable[Callback], hook: str, *args: Any) -> None:
    """Call a hook of each callback in order. A failure raises a CallbackError that names callback and hook."""
    for callback in callbacks:
        _call(callback, hook, *args)


def _call(callback: Callback, hook: str, *args: Any) -> Any:
    try:
        return getattr(callback, hook)(*args)
    except CommandError:
        raise
    except Exception as error:
        name = type(callback).__qualname__
        raise CallbackError(f"callback {name} failed in {hook}: {type(error).__name__}: {error}") from error


def callback_states(callbacks: Iterable[Callback]) -> dict[str, Any]:
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


def load_callback_states(callbacks: Iterable[Callback], states: dict[str, Any], report: Callable[[str], None]) -> None:
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
    for callback in callbacks:
        name = type(callback).__qualname__
        count = sum(type(other).__qualname__ == name for other in named.values())
        named[f"{name} {count + 1}" if count else name] = callback
    return named


def _find_unsafe_type(value: Any) -> str | None:
    """Return the first type that ``torch.load(weights_only=True)`` would reject, or None."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        return next((wrong for part in value if (wrong := _find_unsafe_type(part)) is not None), None)
    return None if type(value) in (str, int, float, bool, NoneType, Tensor) else type(value).__name__


def notify_exception(callbacks: Iterable[Callback], trainer: Trainer, error: BaseException) -> None:
    """Call ``on_exception`` of each callback. Failures only warn, because ``error`` already ends the run."""
    for callback in callbacks:
        try:
            callback.on_exception(trainer, error)
        except Exception as second:
            name = type(callback).__qualname__
            warnings.warn(f"callback {name} failed in on_exception: {second}", stacklevel=2)
