"""Answers of a model to prompts, and the metrics of ``--eval.metric``: in a run, and of a finished checkpoint."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from threading import Timer
from typing import Any, NamedTuple

from toolkit.config.metric_options import MetricArgs
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.planning.best_metric import direction_of
from toolkit.ui.loggers import COLUMNS
from toolkit_metric.answerer import Answerer
from toolkit_metric.entries import parse_metrics
from toolkit_metric.process import MetricProcess, summarize
from toolkit_metric.prompts import Prompt, decode_answer, end_tokens, prompt_template, read_prompts

_TRIAL_ROWS = 2
_SLOW_START_S = 5.0


class MetricSetup(NamedTuple):
    """Prompts and what is known of the metric functions.

    Args:
        directions: Names of the metrics; whether the highest value is the best, None if unknown.
    """

    prompts: list[Prompt]
    eos_ids: list[int]
    directions: dict[str, bool | None]
    needs_answers: bool
    needs_log_probs: bool


def set_up_metrics(
    evaluation: MetricArgs,
    data: Any,
    val: Any,
    tokenizer: Tokenizer,
    block_size: int,
    report: Callable[[str], None],
    stack: ExitStack,
) -> tuple[MetricSetup, list[MetricProcess]]:
    """Start the functions, read the prompts, and call the functions with the references of two rows as answers.

    Args:
        data: The data module of the run.
        val: Its held-out rows.
        block_size: The model's context length.
        stack: Ends the processes.

    Raises:
        UserError: A function or the data cannot be used.
    """
    metrics, timeout = parse_metrics(evaluation.metric), evaluation.metric_timeout
    processes = [stack.enter_context(closing(MetricProcess(metric, timeout))) for metric in metrics]
    needs = {process.traits.needs_log_probs for process in processes}
    template, path = prompt_template(tokenizer), evaluation.metric_data
    prompts = read_prompts(data, val, path, template, evaluation.metric_rows, True in needs, report)
    short = [p for p in prompts if len(p.ids) < block_size and all(len(ids) <= block_size for ids, _ in p.choices)]
    if len(short) < len(prompts):
        reason = f"longer than the model's context of {block_size} tokens"
        report(f"note: --eval.metric: {len(prompts) - len(short)} prompts left out, {reason}")
    if not short:
        raise UserError(f"--eval.metric {evaluation.metric}: no prompt is left; give others by --eval.metric_data")
    directions: dict[str, bool | None] = {}
    for process in processes:
        for name in summarize(try_metric(process, short, report)):
            if name in directions or f"val_{name}" in COLUMNS or name.startswith("loss"):
                raise UserError(f"{process.entry}: {name} is also another metric; rename it")
            is_higher, suffix = process.traits.higher_is_better, process.metric.suffix
            directions[name] = direction_of(is_higher, name.removesuffix(suffix))
    return MetricSetup(short, end_tokens(tokenizer), directions, False in needs, True in needs), processes


def try_metric(process: MetricProcess, prompts: Sequence[Prompt], report: Callable[[str], None]) -> dict[str, Any]:
    """Return a function's values for the references of two prompts. It may load a model.

    Raises:
        UserError: The function failed, or needs references that a prompt has not.
    """
    entry, traits = process.entry, process.traits
    unanswered = next((p.where for p in prompts if not (p.reference or "").strip()), None)
    if traits.needs_references and unanswered is not None:
        raise UserError(f"{entry}: {unanswered}: has no answer to compare with; add one, or remove the row")
    trial = prompts[:_TRIAL_ROWS]
    answers = [[0.0] * len(p.choices) if traits.needs_log_probs else p.reference or "" for p in trial]
    slow = Timer(_SLOW_START_S, report, [f"{entry}: still starting"])
    slow.start()
    try:
        return call_metric(process, trial, answers)
    finally:
        slow.cancel()


def answer_prompts(
    setup: MetricSetup, answerer: Answerer, tokenizer: Tokenizer, max_new_tokens: int
) -> tuple[list[str], list[list[float]]]:
    """Return the answer to each prompt, and the log-probability of each of its choices. Collective (S6)."""
    answers, log_probs = [], []
    if setup.needs_answers:
        ids = [prompt.ids for prompt in setup.prompts]
        tokens = answerer.generate(ids, max_new_tokens=max_new_tokens, eos_ids=setup.eos_ids)
        answers = [decode_answer(tokenizer, *pair) for pair in zip(ids, tokens, strict=True)]
    if setup.needs_log_probs:
        values = iter(answerer.log_probs([choice for prompt in setup.prompts for choice in prompt.choices]))
        log_probs = [[next(values) for _ in prompt.choices] for prompt in setup.prompts]
    return answers, log_probs


def measure_answers(
    setup: MetricSetup, processes: Sequence[MetricProcess], answers: list[str], log_probs: list[list[float]]
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Call the functions. Return the metrics with their standard errors; and by name what there is for each row."""
    by_row: dict[str, Any] = {"answer": answers, "log_probs": log_probs}
    summary: dict[str, float] = {}
    for process in processes:
        measured = call_metric(process, setup.prompts, log_probs if process.traits.needs_log_probs else answers)
        summary |= summarize(measured)
        by_row |= {name: values for name, values in measured.items() if isinstance(values, list)}
    if other := sorted(summary.keys() ^ setup.directions.keys()):
        change = "is missing, but was returned" if other[0] in setup.directions else "was not returned"
        raise UserError(f"--eval.metric: {other[0]} {change} for the first rows; always return the same names")
    return summary, {name: values for name, values in by_row.items() if values}


def call_metric(process: MetricProcess, prompts: Sequence[Prompt], answers: Sequence[Any]) -> dict[str, Any]:
    """Return a function's values for answers to prompts, or for the log-probabilities of their choices."""
    rows = [prompt.row for prompt in prompts]
    if process.traits.needs_prompts:
        rows = [{"messages": p.record.messages, "tools": p.record.tools, "where": p.where} for p in prompts]
    return process.call(answers, [prompt.reference for prompt in prompts], rows)
