"""Run lm-eval tasks on a model."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from toolkit.inference.harness import HarnessLM


def require_lm_eval(tasks: str) -> None:
    """Raise UserError if lm-eval is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise UserError(f"--tasks {tasks}: needs lm-eval; run: pip install 'lm-eval[hf]>=0.4.9'") from error


def run_tasks(
    lm: HarnessLM,
    names: list[str],
    *,
    num_fewshot: int | None,
    limit: float | None,
    include_path: str | None,
    apply_chat_template: bool,
    notice: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Return metrics with standard errors, num_fewshot and the number of samples, by task or task group.

    Args:
        lm: The model.
        names: Names of tasks, groups or tags.
        num_fewshot: Number of few-shot examples; None for the task's default. Ignored by tasks whose default is 0.
        limit: Maximum number of questions per task, or a fraction if below 1; None for all.
        include_path: A folder with user-provided task files.
        apply_chat_template: Whether to use the model's chat template, with the examples as previous turns.
        notice: Called with one line for the user.
    """
    import datasets
    from lm_eval import evaluator

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    evaluator.get_git_commit_hash = lambda: None  # prints "fatal: not a git repository" outside of one
    joined = ",".join(names)
    manager = _manager_for(names, include_path)
    try:
        with redirect_stdout(sys.stderr):  # tasks may print
            results = evaluator.simple_evaluate(
                lm,
                tasks=names,
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                log_samples=False,
                apply_chat_template=apply_chat_template,
                fewshot_as_multiturn=apply_chat_template,
            )
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(f"--tasks {joined}: cannot load the dataset: {error}") from error
    except ValueError as error:
        if "unsafe" not in str(error):
            raise
        raise UserError(f"--tasks {joined}: executes code written by the model, which is not supported") from error
    for name, shots in results["n-shot"].items():
        if num_fewshot is not None and shots != num_fewshot:
            notice(f"--num_fewshot {num_fewshot}: has no effect on task {name}, which uses {shots}")
    return {name: _metrics(values) | _sizes(results, name) for name, values in results["results"].items()}


def _manager_for(names: list[str], include_path: str | None) -> Any:
    """Return a task manager. Index lm-eval's built-in tasks, which takes seconds, only if a name needs them."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise UserError(f"--include_path {include_path}: no such folder; pass a folder with task files")
        manager = TaskManager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_subtasks):
            return manager
    manager = TaskManager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            hint = "use a task name of lm-eval, or --include_path FOLDER with a task file"
            raise UserError(f"--tasks {name}: no such task{did_you_mean(name, manager.all_tasks) or f'; {hint}'}")
    return manager


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return ``{"acc": 0.5, "acc_stderr": 0.1}``. The name of a non-default filter is kept after a comma."""
    named = {key.removesuffix(",none"): value for key, value in values.items() if "," in key}
    return {key: value for key, value in named.items() if isinstance(value, int | float)}


def _sizes(results: dict[str, Any], name: str) -> dict[str, int]:
    sizes = {"num_fewshot": results["n-shot"].get(name), "samples": results["n-samples"].get(name, {}).get("effective")}
    return {key: value for key, value in sizes.items() if value is not None}
