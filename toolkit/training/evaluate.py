"""Evaluation of a checkpoint on a data module, with the validation that training uses."""

from __future__ import annotations

import sys
from typing import Any, Literal

from toolkit.args import Accelerator, Precision
from toolkit.checkpoints.folder import find_checkpoint_dir, load_model
from toolkit.data.base import DataModule
from toolkit.data.loader import val_batches
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.fabric import single_device_fabric
from toolkit.errors import UserError
from toolkit.training.validate import validate


def evaluate(
    checkpoint_dir: str,
    data: DataModule,
    *,
    split: Literal["val", "train"],
    micro_batch_size: int,
    max_iters: int | None,
    max_seq_length: int | None,
    tokenizer_dir: str | None,
    accelerator: Accelerator,
    precision: Precision | None,
) -> dict[str, Any]:
    """Return the data's name, loss (nats per token), perplexity, bits_per_byte, sequences and tokens.

    Without a tokenizer there are no bits per byte.

    Raises:
        UserError: an option does not fit, or the split is empty.
    """
    for name, value in (("micro_batch_size", micro_batch_size), ("max_iters", max_iters)):
        if value is not None and value <= 0:
            raise UserError(f"--{name} {value}: must be greater than zero")
    folder = find_checkpoint_dir(checkpoint_dir)
    fabric = single_device_fabric(accelerator, precision)
    model = load_model(folder)
    length = max_seq_length or model.config.block_size
    if not 0 < length <= model.config.block_size:
        raise UserError(f"--max_seq_length {length}: the model takes 1 to {model.config.block_size} tokens")
    with_tokenizer = tokenizer_dir or (folder if (folder / "tokenizer.json").is_file() else None)
    prepared = data.prepare(
        tokenizer=None if with_tokenizer is None else Tokenizer.load(with_tokenizer),
        max_seq_length=length,
        report=lambda line: print(line, file=sys.stderr),
    )
    rows = prepared.val if split == "val" else prepared.train
    if rows is None or not len(rows):
        raise UserError(f"--split {split}: this data has none; give --data.val_fraction, or use --split train")
    n_rows = len(rows) if max_iters is None else min(len(rows), max_iters * micro_batch_size)
    batches = val_batches(rows, micro_batch_size=micro_batch_size, rank=0, world_size=1, max_rows=n_rows)
    token_bytes = prepared.tokenizer.token_bytes() if prepared.tokenizer is not None else None
    metrics = validate(fabric, fabric.setup(model), batches, token_bytes)
    names = {"val_loss": "loss", "val_ppl": "perplexity", "val_bpb": "bits_per_byte"}
    result = {"data": f"{type(data).__name__}, {split}"} | {names[k]: v for k, v in metrics.items()}
    return result | {"sequences": n_rows, "tokens": n_rows * length}
