"""Load a checkpoint for inference: used by generate, chat and :func:`toolkit.generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from toolkit.checkpoints.folder import find_model, load_model
from toolkit.config import Accelerator
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import pick_accelerator
from toolkit.models.gpt import GPT

_DTYPES = {None: None, "32-true": torch.float32, "bf16-true": torch.bfloat16}


class Loaded(NamedTuple):
    folder: Path
    model: GPT
    """In evaluation mode; for a LoRA checkpoint with base and unmerged adapters."""
    tokenizer: Tokenizer
    device: str


def load_checkpoint(
    checkpoint_dir: str,
    *,
    base_checkpoint_dir: str | None,
    accelerator: Accelerator,
    precision: Literal["32-true", "bf16-true"] | None,
    verify_checkpoint: bool = True,
) -> Loaded:
    """Load a checkpoint with its tokenizer.

    Args:
        checkpoint_dir: A folder, or a name below ``checkpoints/``.
        base_checkpoint_dir: Path of the adapters' base model, if it has moved.
        accelerator: The accelerator to use.
        precision: Dtype of the weights; default: that of the checkpoint.
        verify_checkpoint: Whether to verify checksums of the files.

    Raises:
        UserError: A file is missing or does not match, or base_checkpoint_dir would have no effect.
    """
    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    device = pick_accelerator(accelerator)
    tokenizer = Tokenizer.load(folder, flag="checkpoint_dir")
    model = load_model(folder, device, _DTYPES[precision], base_checkpoint_dir)
    return Loaded(folder, model.eval(), tokenizer, device)
