"""Run lm-eval tasks at each validation, for ``--eval.tasks``, as ``toolkit evaluate`` does."""

import json
import re
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.distributed import ranks
from toolkit.distributed.launchers import run_toolkit
from toolkit.errors import CommandError, UserError
from toolkit.io.tempfiles import temporary_prefix
from toolkit.planning.best_metric import VAL
from toolkit.training.checkpointer import Checkpointer
from toolkit.training.launch import Launch
from toolkit.training.run import Metrics, Run
from toolkit.ui.progress import STDERR
from toolkit_metric.callback import TimedMetrics

_TRIAL_QUESTIONS = 2  # one has no standard error


class TaskMetrics(TimedMetrics):
    """Exports the model to a temporary folder and runs tasks in a process of rank 0.

    lm-eval seeds all random generators, so it must not run in the training process. The constructor tries two questions
    of each task. Collective.
    """

    option = "--eval.tasks"

    def __init__(self, launch: Launch, checkpointer: Checkpointer) -> None:
        super().__init__()
        self._launch, self._checkpointer = launch, checkpointer
        metrics, directions = self._evaluate(_TRIAL_QUESTIONS)
        self.columns, self.higher_is_better = tuple(metrics), {name: bool(value) for name, value in directions.items()}

    def measure(self, trainer: Run) -> Metrics:
        return self._evaluate(trainer.args.eval.metric_rows)[0]

    def _evaluate(self, limit: int | None) -> tuple[Metrics, Metrics]:
        display = self._launch.display
        display.phase("running lm-eval tasks")
        with TemporaryDirectory(prefix=temporary_prefix()) as parent:  # empty on the other ranks
            folder = Path(parent) / "model"
            folder.mkdir()
            self._checkpointer.export(folder)
            reporter = ranks.WaitReporter("run lm-eval tasks", display.message)
            return ranks.result_of_rank0(partial(self._run, folder, limit), reporter)

    def _run(self, folder: Path, limit: int | None) -> tuple[Metrics, Metrics]:
        evaluation = self._launch.args.eval
        words = ["evaluate", str(folder), "--tasks", str(evaluation.tasks), "--format", "json"]
        words += ["--micro_batch_size", "16", "--verify_checkpoint", "false"]
        words += ["--accelerator", self._launch.fabric.device.type]
        words += [] if limit is None else ["--limit", str(limit)]
        words += [] if evaluation.tasks_path is None else ["--include_path", evaluation.tasks_path]
        try:
            output = run_toolkit(words)
        except CommandError as error:
            raise UserError(f"--eval.tasks {evaluation.tasks}: {error}") from error
        result = json.loads(output.splitlines()[-1])
        return columns_of(result["tasks"]), columns_of(result["higher_is_better"])


def columns_of(results: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the metrics of tasks as columns: val_TASK_METRIC, with the name of a filter of answers, and _stderr."""
    columns = {}
    for task, values in results.items():
        for key in values.keys() - {"num_fewshot", "samples"}:
            metric, _, answer_filter = key.partition(",")
            words = filter(None, [task, metric.removesuffix(STDERR), answer_filter])
            name = re.sub(r"[^\w.@-]", "_", "_".join(words))
            columns[f"{VAL}{name}{STDERR * metric.endswith(STDERR)}"] = float(values[key])
    return dict(sorted(columns.items()))
