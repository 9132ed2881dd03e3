"""``--eval.metric`` and ``--eval.tasks`` of a run: checks and callbacks. Imports the rest only for runs that use it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.errors import require_package

if TYPE_CHECKING:
    from contextlib import ExitStack

    from toolkit.planning.run_args import RunArgs
    from toolkit.training.callbacks.registered import RunCallback
    from toolkit.training.launch import Launch


def check(args: RunArgs) -> None:
    """Raise UserError if ``--eval.metric`` has a mistake."""
    if args.eval.metric is not None:
        from toolkit_metric.entries import parse_metrics

        parse_metrics(args.eval.metric)


def check_start(args: RunArgs, has_callbacks: bool) -> None:
    """Raise UserError if the run cannot use its metrics or tasks, or has no metric ``--eval.best_by``."""
    if args.eval.metric is not None:
        from toolkit_metric.process import check_best_by, check_metrics

        check_best_by(args, has_callbacks)
        check_metrics(args.eval)
    if args.eval.tasks is not None:
        require_package(f"--eval.tasks {args.eval.tasks}", "lm_eval", "0.4.9.2")


def make_callbacks(launch: Launch, stack: ExitStack) -> list[RunCallback]:
    """Return the callbacks of a run's metrics and tasks."""
    callbacks: list[Any] = []
    if launch.args.eval.metric:
        from toolkit_metric.callback import make_answer_metrics

        callbacks.append(make_answer_metrics(launch, stack))
    if launch.args.eval.tasks is not None:
        from toolkit_metric.task_callback import TaskMetrics

        callbacks.append(partial(TaskMetrics, launch))
    return callbacks
