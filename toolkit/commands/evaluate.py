"""`toolkit evaluate`: how well a checkpoint predicts text."""

from __future__ import annotations

from typing import Literal

from toolkit.args import Precision
from toolkit.data import DataModule, PythonStdlib


def setup(
    checkpoint_dir: str,
    data: DataModule = PythonStdlib(),
    split: Literal["val", "train"] = "val",
    micro_batch_size: int = 4,
    max_iters: int | None = None,
    max_seq_length: int | None = None,
    tokenizer_dir: str | None = None,
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto",
    precision: Precision | None = None,
    format: Literal["table", "json"] = "table",
) -> None:
    """Print the loss (nats per token), the perplexity and the bits per byte of a checkpoint on text.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/.
        data: The text.
        split: The held-out part of the data, or the training part.
        micro_batch_size: Sequences per forward pass.
        max_iters: At most so many batches; all when not given.
        max_seq_length: Tokens per sequence; the model's context length when not given.
        tokenizer_dir: A folder with a tokenizer.json; the checkpoint's own when not given.
        accelerator: Where to compute.
        precision: 32-true on a CPU and bf16-mixed on CUDA when not given.
        format: How to print the result.
    """
    import json

    from toolkit.training.evaluate import evaluate

    result = evaluate(
        checkpoint_dir,
        data,
        split=split,
        micro_batch_size=micro_batch_size,
        max_iters=max_iters,
        max_seq_length=max_seq_length,
        tokenizer_dir=tokenizer_dir,
        accelerator=accelerator,
        precision=precision,
    )
    if format == "json":
        print(json.dumps(result))
    else:
        for name, value in result.items():
            shown = {float: "{:,.4f}", int: "{:,}"}.get(type(value), "{}").format(value)
            print(f"{name:16} {shown}")
