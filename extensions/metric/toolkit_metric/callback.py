"""Measure answers that the model generates at each validation, for ``--eval.metric``."""

import json
import time
from abc import abstractmethod
from contextlib import ExitStack
from functools import partial
from typing import Any

from toolkit.data.batch import choose_padding
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.io.atomic import write_atomic
from toolkit.objectives.inputs import original_module
from toolkit.planning.best_metric import VAL
from toolkit.training.callbacks.samples import generating
from toolkit.training.launch import Launch
from toolkit.training.run import Callback, Metrics, Run
from toolkit_metric.answerer import Answerer
from toolkit_metric.answers import MetricSetup, answer_prompts, measure_answers, set_up_metrics
from toolkit_metric.process import MetricProcess

ANSWERS = "logs/answers.jsonl"
"""The answers of the last validation, one JSON object per line."""


class TimedMetrics(Callback):
    """Metrics of validations whose share of the time is printed at the end."""

    option: str

    def __init__(self) -> None:
        self.seconds = 0.0

    @abstractmethod
    def measure(self, trainer: Run) -> Metrics:
        """Return the metrics, or raise the same UserError, on every rank. Collective."""

    def validation_metrics(self, trainer: Run) -> Metrics:
        start = time.perf_counter()
        trainer.display.phase(f"measuring {self.option}")
        try:
            return self.measure(trainer)
        except UserError as error:
            if not trainer.progress.step:
                raise
            raise type(error)(f"{error}{trainer.save_step()}") from error
        finally:
            self.seconds += time.perf_counter() - start

    def on_train_end(self, trainer: Run) -> None:
        share = self.seconds / (time.perf_counter() - trainer.launched_at)
        trainer.display.message(f"{self.option} took {self.seconds:,.1f} s, {100 * share:.0f} % of this launch")


class AnswerMetrics(TimedMetrics):
    """Generates answers on all ranks and calls the metric functions, on rank 0.

    Draws no random numbers and does not change training.

    Args:
        setup: Prompts and columns.
        processes: The metric functions; on rank 0 only.
        tokenizer: Decodes the answers.
    """

    option = "--eval.metric"

    def __init__(self, setup: MetricSetup, processes: list[MetricProcess], tokenizer: Tokenizer) -> None:
        super().__init__()
        self.setup, self.processes, self.tokenizer = setup, processes, tokenizer
        self.higher_is_better = {f"{VAL}{name}": is_higher for name, is_higher in setup.directions.items()}
        self.columns = tuple(self.higher_is_better)

    def measure(self, trainer: Run) -> Metrics:
        with generating(trainer.model), trainer.fabric.autocast():
            answerer, n_tokens = answerer_of(trainer, trainer.model), trainer.args.eval.metric_new_tokens
            answers = answer_prompts(self.setup, answerer, self.tokenizer, n_tokens)
        reporter = ranks.WaitReporter("measure answers", trainer.display.message)
        return ranks.result_of_rank0(partial(self._measure, trainer, *answers), reporter)

    def _measure(self, trainer: Run, answers: list[str], log_probs: list[list[float]]) -> Metrics:
        """Call the functions, and write the answers. On rank 0."""
        summary, by_row = measure_answers(self.setup, self.processes, answers, log_probs)
        lines = [
            {"step": trainer.progress.step, "row": p.where, "prompt": self.tokenizer.decode(p.ids)}
            | {"reference": p.reference, **{name: values[i] for name, values in by_row.items()}}
            for i, p in enumerate(self.setup.prompts)
        ]
        # JSON has neither NaN nor infinity
        lines = json.loads(json.dumps(lines), parse_constant=lambda name: None)
        write_atomic(trainer.out_dir / ANSWERS, "".join(json.dumps(line) + "\n" for line in lines).encode())
        return {f"{VAL}{name}": value for name, value in summary.items()}


def answerer_of(launch: Launch, model: Any, gathers_weights: bool = False) -> Answerer:
    """Return how the ranks of a run answer prompts with its model, as the strategy wraps it; see :class:`Answerer`."""
    strategy, device = launch.config.strategy, launch.fabric.device
    module: Any = original_module(model)
    is_sharded, is_ours = strategy.kind == "fsdp", strategy.extension is None
    gathers_weights = gathers_weights and is_sharded and is_ours
    is_longrope = module.config.original_max_position is not None  # its forward passes depend on the prompts
    return Answerer(
        model if is_sharded or not is_ours else module,
        device,
        is_divided=is_ours
        and strategy.layout.model_parallel == 1
        and not (is_sharded and is_longrope and not gathers_weights),
        is_sharded=is_sharded,
        gathers_weights=gathers_weights,
        padding=choose_padding(device.type, True, module.config.block_size),
    )


def make_answer_metrics(launch: Launch, stack: ExitStack) -> AnswerMetrics:
    """Start the functions of ``--eval.metric``, and try them. ``stack`` ends their processes.

    Raises:
        UserError: A function or the data cannot be used.
    """
    tokenizer = launch.data.tokenizer
    if tokenizer is None:
        raise UserError(f"--eval.metric {launch.args.eval.metric}: needs a tokenizer; specify --tokenizer_dir")
    evaluation, config, display = launch.args.eval, launch.spec.config, launch.display
    assert config is not None  # refused in planning/compatibility.py
    processes: list[MetricProcess] = []

    def set_up() -> MetricSetup:
        args = (launch.args.data, launch.data.val, tokenizer, config.block_size, display.message, stack)
        setup, processes[:] = set_up_metrics(evaluation, *args)
        return setup

    display.phase("starting --eval.metric")
    setup = ranks.result_of_rank0(set_up, ranks.WaitReporter("start --eval.metric", display.message))
    return AnswerMetrics(setup, processes, tokenizer)
