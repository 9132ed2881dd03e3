"""`toolkit evaluate`: loss on text, metrics of answers, or lm-eval tasks."""

import json
from operator import attrgetter
from typing import Any

from toolkit.checkpoints.find import find_checkpoint_dir, head_of, is_hf_folder
from toolkit.errors import require_option
from toolkit.planning.start_checks import check_files
from toolkit_metric.options import EvaluateOptions, RunData
from toolkit_metric.process import check_metrics

_ONLY_LOSS = ("split", "eval.max_iters", "micro_batch_size")
_ONLY_TEXT = ("split", "eval.max_iters", "max_seq_length", "trust_checkpoint_data", "eval.metric")
_ONLY_TASKS = ("num_fewshot", "limit", "include_path", "apply_chat_template")


def setup(options: EvaluateOptions) -> None:
    """Print loss (nats per token), perplexity and bits per byte of a checkpoint on text, metrics of its answers, or its
    results on lm-eval tasks.
    """
    has_tasks, has_data = options.tasks is not None, not isinstance(options.data, RunData)
    has_metric = options.eval.metric is not None
    defaults = EvaluateOptions(options.checkpoint_dir)
    refused = dict.fromkeys(_ONLY_LOSS if has_metric else (), "has no effect with --eval.metric; remove it")
    why = "has no effect with --tasks; remove it" if has_tasks else "requires --tasks; remove it"
    require_option(not (has_tasks and has_data), "data", type(options.data).__name__, why)
    refused |= dict.fromkeys(_ONLY_TEXT if has_tasks else _ONLY_TASKS, why)
    for name, reason in refused.items():
        value = attrgetter(name)(options)
        require_option(value == attrgetter(name)(defaults), name, value, reason)
    has_effect = not (options.trust_checkpoint_data and has_data)
    require_option(has_effect, "trust_checkpoint_data", True, "has no effect with --data; remove it")
    if not has_tasks or not is_hf_folder(options.checkpoint_dir):
        head = head_of(find_checkpoint_dir(options.checkpoint_dir))  # before PyTorch is imported
        for name in ("tasks", "eval.metric"):
            value = attrgetter(name)(options)
            is_supported = value is None or head is None
            require_option(is_supported, name, value, f"the model has a {head} head and writes no text; remove it")
    if has_data:
        check_files(options.data, f"toolkit evaluate {options.checkpoint_dir}")
    check_metrics(options.eval)

    from toolkit_metric.evaluate import evaluate, evaluate_answers, evaluate_tasks, open_checkpoint

    checkpoint = open_checkpoint(options)
    result = (evaluate_tasks if has_tasks else evaluate_answers if has_metric else evaluate)(checkpoint)
    if options.format == "json":
        print(json.dumps(result))
    else:
        print(format_tasks(result) if has_tasks else format_text_result(result))


def format_text_result(result: dict[str, Any]) -> str:
    formats = {float: "{:,.4f}", int: "{:,}"}
    return "\n".join(f"{name:16} {formats.get(type(value), '{}').format(value)}" for name, value in result.items())


def format_tasks(result: dict[str, Any]) -> str:
    """Format task results as a table, followed by the settings."""
    lines = [("task", "metric", "value", "stderr", "shots", "samples")]
    for task, values in result["tasks"].items():
        for name in values:
            error = values.get("_stderr,".join(name.split(",")) if "," in name else f"{name}_stderr")
            if name in ("num_fewshot", "samples") or "_stderr" in name:
                continue
            shots, samples = (str(values.get(size, "")) for size in ("num_fewshot", "samples"))
            lines.append((task, name, f"{values[name]:.4f}", "" if error is None else f"{error:.4f}", shots, samples))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = []
    for task, name, *numbers in lines:
        columns = [f"{number:>{width}}" for number, width in zip(numbers, widths[2:], strict=True)]
        table.append(f"{task:{widths[0]}}  {name:{widths[1]}}  {'  '.join(columns)}".rstrip())
    return "\n".join([*table, "", *(f"{name:20} {value}" for name, value in result["settings"].items())])
