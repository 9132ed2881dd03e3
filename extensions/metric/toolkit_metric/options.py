"""The options of `toolkit evaluate`. Does not import torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from toolkit.config import AUTO, Accelerator, Auto, Precision
from toolkit.config.metric_options import MetricArgs
from toolkit.data import DataModule, PreparedData


@dataclass
class RunData(DataModule):
    """The data that the checkpoint was trained on."""

    num_workers = 0  # without annotation: not an option

    def prepare(self, *, tokenizer: Any, max_seq_length: int, report: Callable[[str], None] = print) -> PreparedData:
        raise AssertionError("a placeholder for the data of the checkpoint's run")


@dataclass(frozen=True)
class EvalLimits(MetricArgs):
    """Limits of an evaluation, and metrics of answers.

    Args:
        max_iters: Maximum number of batches of micro_batch_size; null uses all.
    """

    max_iters: PositiveInt | None = None


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of `toolkit evaluate`.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/; adapters are loaded unmerged, and for tasks
            merged in bf16.
        data: The text. Default: the data of the checkpoint's run, or PythonStdlib if unknown.
        split: Split to evaluate: val (held out) or train.
        micro_batch_size: Sequences per forward pass.
        eval: Limits of the evaluation; with eval.metric, metrics of answers instead of the loss.
        max_seq_length: Tokens per sequence. auto: as in the run if its data is used, else the model's context length.
        trust_checkpoint_data: Without --data, use the data paths in the checkpoint's hyperparameters.yaml; a cache is
            written there. Not needed with eval.metric_data.
        tokenizer_dir: A folder with a tokenizer.json. Default: the checkpoint.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        accelerator: Device type.
        precision: auto: 32-true on CPU, bf16-true on CUDA.
        format: Output format.
        quantize: 4-bit format (bitsandbytes) of the blocks' linear layers. bnb.nf4-dq also quantizes the scales. Tasks
            run in bf16 instead.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        tasks: Run lm-eval tasks instead, separated by commas, such as hellaswag,arc_easy: with transformers, on a
            temporary export, or on a Hugging Face folder as it is.
        num_fewshot: Few-shot examples per question. auto: the task's default.
        limit: Maximum number of questions per task, or a fraction if below 1; null uses all.
        include_path: A folder with custom task files.
        apply_chat_template: Format tasks as a chat. auto: true if the checkpoint has a chat template.
    """

    is_flat: ClassVar[bool] = True  # the fields are options without a prefix

    checkpoint_dir: str
    data: DataModule = field(default_factory=RunData)
    split: Literal["val", "train"] = "val"
    micro_batch_size: PositiveInt = 4
    eval: EvalLimits = EvalLimits()
    max_seq_length: int | Auto = AUTO
    trust_checkpoint_data: bool = False
    tokenizer_dir: str | None = None
    base_checkpoint_dir: str | None = None
    accelerator: Accelerator = "auto"
    precision: Precision | Auto = AUTO
    format: Literal["table", "json"] = "table"
    quantize: Literal["bnb.nf4", "bnb.nf4-dq"] | None = None
    verify_checkpoint: bool = True
    tasks: str | None = None
    num_fewshot: NonNegativeInt | Auto = AUTO
    limit: PositiveFloat | None = None
    include_path: str | None = None
    apply_chat_template: bool | Auto = AUTO
