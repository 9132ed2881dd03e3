"""Measure answers that the model generates at each validation, for ``--eval.metric``."""

import json
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from threading import Timer
from typing import Any, NamedTuple

import torch

from toolkit.data.batch import choose_padding
from toolkit.data.sft.prompts import Prompt, prompt_template, read_prompts
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.inference.answers import Answerer
from toolkit.inference.text import TextStream, stop_tokens
from toolkit.io.atomic import write_atomic
from toolkit.metrics import parse_metrics
from toolkit.metrics.process import MetricProcess, summarize
from toolkit.objectives.inputs import original_module
from toolkit.training.best_metric import VAL
from toolkit.training.callbacks.samples import generating
from toolkit.training.launch import Launch
from toolkit.training.run import Callback, Metrics, Run
from toolkit.ui.loggers import COLUMNS

ANSWERS = "logs/answers.jsonl"
"""The answers of the last validation, one JSON object per line."""
_TRIAL_ROWS = 2
_SLOW_START_S = 5.0
_GRAPH_SHARE = 0.25  # of a device's memory that must be free for a CUDA graph


class MetricSetup(NamedTuple):
    """Prompts and what is known of the metric functions."""

    prompts: list[Prompt]
    eos_ids: list[int]
    columns: tuple[str, ...]
    needs_answers: bool
    needs_log_probs: bool


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
            raise UserError(f"{error}{trainer.save_step()}") from error
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
        self.columns = setup.columns

    def measure(self, trainer: Run) -> Metrics:
        with generating(trainer.model), trainer.fabric.autocast():
            answers = self._answer(trainer)
        reporter = ranks.WaitReporter("measure answers", trainer.display.message)
        return ranks.result_of_rank0(partial(self._measure, trainer, *answers), reporter)

    def _answer(self, trainer: Run) -> tuple[list[str], list[list[float]]]:
        """Return the answer to each prompt, and the log-probability of each of its choices. Collective (S6)."""
        strategy, device, prompts = trainer.config.strategy, trainer.fabric.device, self.setup.prompts
        module: Any = original_module(trainer.model)
        is_sharded = strategy.kind == "fsdp"
        is_longrope = module.config.original_max_position is not None  # its forward passes depend on the prompts
        answerer = Answerer(
            trainer.model if is_sharded or strategy.extension is not None else module,
            device,
            is_divided=strategy.extension is None
            and strategy.layout.model_parallel == 1
            and not (is_sharded and is_longrope),
            is_sharded=is_sharded,
            padding=choose_padding(device.type, True, module.config.block_size),
        )
        answers, log_probs = [], []
        if self.setup.needs_answers:
            ids = [prompt.ids for prompt in prompts]
            tokens = answerer.generate(
                ids,
                max_new_tokens=trainer.args.eval.metric_new_tokens,
                eos_ids=self.setup.eos_ids,
                cuda_graph=not is_sharded and _has_room(device),
            )
            streams = (TextStream(self.tokenizer, prompt) for prompt in ids)
            answers = ["".join(stream.read(answer)) for stream, answer in zip(streams, tokens, strict=True)]
        if self.setup.needs_log_probs:
            values = iter(answerer.log_probs([choice for prompt in prompts for choice in prompt.choices]))
            log_probs = [[next(values) for _ in prompt.choices] for prompt in prompts]
        return answers, log_probs

    def _measure(self, trainer: Run, answers: list[str], log_probs: list[list[float]]) -> Metrics:
        """Call the functions, and write the answers. On rank 0."""
        prompts, step = self.setup.prompts, trainer.progress.step
        by_row: dict[str, Any] = {"answer": answers, "log_probs": log_probs}
        summary: Metrics = {}
        for process in self.processes:
            measured = _call(process, prompts, log_probs if process.needs_log_probs else answers)
            summary |= summarize(measured)
            by_row |= {name: values for name, values in measured.items() if isinstance(values, list)}
        lines = [
            {"step": step, "row": p.where, "prompt": self.tokenizer.decode(p.ids), "reference": p.reference}
            | {name: values[i] for name, values in by_row.items() if values}
            for i, p in enumerate(prompts)
        ]
        # JSON has neither NaN nor infinity
        lines = json.loads(json.dumps(lines), parse_constant=lambda name: None)
        write_atomic(trainer.out_dir / ANSWERS, "".join(json.dumps(line) + "\n" for line in lines).encode())
        columns = {f"{VAL}{name}": value for name, value in summary.items()}
        if other := sorted(columns.keys() ^ {*self.columns}):
            raise UserError(f"--eval.metric: {other[0]} is returned for some rows only; always return the same names")
        return columns


def make_answer_metrics(launch: Launch, stack: ExitStack) -> list[AnswerMetrics]:
    """Start the functions of ``--eval.metric``, if there are any, and try them. ``stack`` ends their processes.

    Raises:
        UserError: A function or the data cannot be used.
    """
    tokenizer = launch.data.tokenizer
    if not launch.args.eval.metric:
        return []
    if tokenizer is None:
        raise UserError(f"--eval.metric {launch.args.eval.metric}: needs a tokenizer; specify --tokenizer_dir")
    processes: list[MetricProcess] = []
    reporter = ranks.WaitReporter("start --eval.metric", launch.display.message)
    setup = ranks.result_of_rank0(lambda: _set_up(launch, tokenizer, processes, stack), reporter)
    return [AnswerMetrics(setup, processes, tokenizer)]


def _set_up(launch: Launch, tokenizer: Tokenizer, processes: list[MetricProcess], stack: ExitStack) -> MetricSetup:
    """Start the functions, read the prompts, and call the functions with the references of two rows as answers."""
    evaluation, config = launch.args.eval, launch.state.model.config
    assert config is not None  # refused in planning/compatibility.py
    for metric in parse_metrics(evaluation.metric):
        processes.append(MetricProcess(metric, evaluation.metric_timeout))
        stack.callback(processes[-1].close)
    needs = {process.needs_log_probs for process in processes}
    template = prompt_template(tokenizer)
    prompts = read_prompts(
        launch.args.data, launch.data.val, evaluation.metric_data, template, evaluation.metric_rows, True in needs,
        launch.display.message,
    )  # fmt: skip
    limit = config.block_size
    short = [p for p in prompts if len(p.ids) < limit and all(len(ids) <= limit for ids, _ in p.choices)]
    if len(short) < len(prompts):
        reason = f"longer than the model's context of {limit} tokens"
        launch.display.message(f"note: --eval.metric: {len(prompts) - len(short)} prompts left out, {reason}")
    if not short:
        raise UserError(f"--eval.metric {evaluation.metric}: no prompt is left; give others by --eval.metric_data")
    names: list[str] = []
    for process in processes:
        trial = short[:_TRIAL_ROWS]
        answers = [[0.0] * len(p.choices) if process.needs_log_probs else p.reference or "" for p in trial]
        entry = f"--eval.metric {process.metric.entry}"
        launch.display.phase(f"starting {entry}")
        slow = Timer(
            _SLOW_START_S, launch.display.message, [f"starting {entry}: it may load a model, which takes time"]
        )
        slow.start()
        try:
            values = _call(process, trial, answers)
        finally:
            slow.cancel()
        for name in summarize(values):
            if (column := f"{VAL}{name}") in [*names, *COLUMNS] or name.startswith("loss"):
                raise UserError(f"{entry}: {name} is also another metric; rename it")
            names.append(column)
    eos_ids = list(dict.fromkeys([*template.stop_ids, *stop_tokens(tokenizer)]))
    return MetricSetup(short, eos_ids, tuple(names), False in needs, True in needs)


def _call(process: MetricProcess, prompts: Sequence[Prompt], answers: Sequence[Any]) -> dict[str, Any]:
    rows = [prompt.row for prompt in prompts]
    if process.needs_prompts:
        rows = [{"messages": p.record.messages, "tools": p.record.tools, "where": p.where} for p in prompts]
    return process.call(answers, [prompt.reference for prompt in prompts], rows)


def _has_room(device: torch.device) -> bool:
    """Whether a CUDA device has memory for a CUDA graph."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free > _GRAPH_SHARE * total
