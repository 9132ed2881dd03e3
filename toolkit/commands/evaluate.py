"""`toolkit evaluate`: loss on text, or lm-eval tasks."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.checkpoints.find import find_checkpoint_dir, is_hf_folder
from toolkit.config import AUTO, Accelerator, Auto, Precision, none_if_auto
from toolkit.data import DataModule, PreparedData
from toolkit.errors import require_option
from toolkit.planning.options import check_files


@dataclass
class RunData(DataModule):
    """The data that the checkpoint was trained on."""

    num_workers = 0  # without annotation: not an option

    def prepare(self, *, tokenizer: Any, max_seq_length: int, report: Callable[[str], None] = print) -> PreparedData:
        raise AssertionError("a placeholder for the data of the checkpoint's run")


@dataclass
class EvalLimits:
    """Limits of an evaluation.

    Args:
        max_iters: Maximum number of batches of micro_batch_size; null uses all.
    """

    max_iters: PositiveInt | None = None


@dataclass(frozen=True)
class TaskOptions:
    """Options for lm-eval tasks.

    Args:
        tasks: Run lm-eval tasks instead, separated by commas, such as hellaswag,arc_easy: with transformers, on a
            temporary export, or on a Hugging Face folder as it is.
        num_fewshot: Few-shot examples per question. auto: the task's default.
        limit: Maximum number of questions per task, or a fraction if below 1; null uses all.
        include_path: A folder with custom task files.
        apply_chat_template: Format tasks as a chat. auto: true if the checkpoint has a chat template.
    """

    is_flat: ClassVar[bool] = True  # the fields are options without a prefix

    tasks: str | None = None
    num_fewshot: NonNegativeInt | Auto = AUTO
    limit: PositiveFloat | None = None
    include_path: str | None = None
    apply_chat_template: bool | Auto = AUTO

    @property
    def settings(self) -> dict[str, Any]:
        """All options except ``tasks``. Options that are auto are None."""
        return {name: none_if_auto(value) for name, value in vars(self).items() if name != "tasks"}


def setup(
    checkpoint_dir: str,
    data: DataModule = RunData(),
    split: Literal["val", "train"] = "val",
    micro_batch_size: PositiveInt = 4,
    eval: EvalLimits = EvalLimits(),
    max_seq_length: int | Auto = AUTO,
    trust_checkpoint_data: bool = False,
    tokenizer_dir: str | None = None,
    base_checkpoint_dir: str | None = None,
    accelerator: Accelerator = "auto",
    precision: Precision | Auto = AUTO,
    format: Literal["table", "json"] = "table",
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None,
    verify_checkpoint: bool = True,
    task_options: TaskOptions = TaskOptions(),
) -> None:
    """Print loss (nats per token), perplexity and bits per byte of a checkpoint on text, or its results on lm-eval
    tasks.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged, and for tasks
            merged in bf16.
        data: The text. Default: the data of the checkpoint's run, or PythonStdlib if unknown.
        split: Split to evaluate: val (held out) or train.
        micro_batch_size: Sequences per forward pass.
        eval: Limits of the evaluation.
        max_seq_length: Tokens per sequence. auto: as in the run if its data is used, else the model's context length.
        trust_checkpoint_data: Without --data, use the data paths in the checkpoint's hyperparameters.yaml; a cache is
            written there.
        tokenizer_dir: A folder with a tokenizer.json. Default: the checkpoint.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: auto: 32-true on CPU, bf16-true on CUDA.
        quantize: 4-bit format (bitsandbytes) of the blocks' linear layers. bnb.nf4-dq also quantizes the scales. Tasks
            run in bf16 instead.
        format: Output format.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        task_options: See :class:`TaskOptions`.
    """
    tasks = task_options.tasks
    has_data = not isinstance(data, RunData)
    text_options = {
        "data": type(data).__name__ if has_data else None,
        "split": None if split == "val" else split,
        "eval.max_iters": eval.max_iters,
        "max_seq_length": none_if_auto(max_seq_length),
        "trust_checkpoint_data": trust_checkpoint_data or None,
    }
    why = "requires --tasks" if tasks is None else "has no effect with --tasks"
    for name, value in (task_options.settings if tasks is None else text_options).items():
        require_option(value is None, name, value, f"{why}; remove it")
    has_effect = not (trust_checkpoint_data and has_data)
    require_option(has_effect, "trust_checkpoint_data", True, "has no effect with --data; remove it")
    if tasks is None or not is_hf_folder(checkpoint_dir):
        find_checkpoint_dir(checkpoint_dir)  # before PyTorch is imported
    if has_data:
        check_files(data)

    from toolkit.training.evaluate import evaluate, evaluate_tasks, open_checkpoint

    checkpoint = open_checkpoint(
        checkpoint_dir,
        base_checkpoint_dir=base_checkpoint_dir,
        tokenizer_dir=tokenizer_dir,
        accelerator=accelerator,
        precision=precision,
        quantize=quantize,
        verify=verify_checkpoint,
        takes_hf=tasks is not None,
    )
    if tasks is not None:
        result = evaluate_tasks(checkpoint, tasks, micro_batch_size=micro_batch_size, **task_options.settings)
        print(json.dumps(result) if format == "json" else format_tasks(result))
        return
    result = evaluate(
        checkpoint,
        data if has_data else None,
        split=split,
        micro_batch_size=micro_batch_size,
        max_iters=eval.max_iters,
        max_seq_length=none_if_auto(max_seq_length),
        trust_checkpoint_data=trust_checkpoint_data,
    )
    print(json.dumps(result) if format == "json" else format_text_result(result))


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
