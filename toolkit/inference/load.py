"""Load a checkpoint for inference: used by generate, chat and :func:`toolkit.generate`."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from toolkit.checkpoints.folder import find_model, load_model, require_language_model
from toolkit.config import Accelerator
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.device import pick_accelerator
from toolkit.models.gpt import GPT
from toolkit.models.head import pad_head
from toolkit.models.lora import is_adapter
from toolkit.models.quantize import Quantize, quantize_linears

_DTYPES = {None: None, "32-true": torch.float32, "bf16-true": torch.bfloat16}


class LoadedModel(NamedTuple):
    folder: Path
    model: GPT
    """The model in evaluation mode; for a LoRA checkpoint the base with unmerged adapters."""
    tokenizer: Tokenizer
    device: str


def load_checkpoint(
    checkpoint_dir: str,
    *,
    base_checkpoint_dir: str | None,
    accelerator: Accelerator,
    precision: Literal["32-true", "bf16-true"] | None,
    quantize: Quantize | None = None,
    verify_checkpoint: bool = True,
    takes_head: bool = False,
) -> LoadedModel:
    """Load a checkpoint with its tokenizer.

    Args:
        checkpoint_dir: A folder, or a name below ``checkpoints/``.
        base_checkpoint_dir: New path of the adapters' base model, if it has moved.
        accelerator: Device type.
        precision: Dtype of the weights; default: bf16-true on a CUDA device that supports it, else the checkpoint's; on
            a CPU, 32-true with ``takes_head``, as in validation.
        quantize: See :func:`load_quantized`.
        verify_checkpoint: Whether to verify the files' checksums.
        takes_head: Whether the model may have a score layer in place of the LM head.
    """
    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    device = pick_accelerator(accelerator)
    tokenizer = Tokenizer.load(folder, flag="checkpoint_dir")
    dtype = _DTYPES[precision]
    if dtype is None and device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        dtype = torch.bfloat16
    elif dtype is None and device == "cpu" and takes_head:
        dtype = torch.float32
    model = load_quantized(folder, quantize, device, dtype, base_checkpoint_dir)
    if not takes_head:
        require_language_model(model.config, f"checkpoint_dir {folder}")
    return LoadedModel(folder, model.eval(), tokenizer, device)


def load_quantized(
    folder: Path,
    kind: Quantize | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
    base_checkpoint_dir: str | Path | None = None,
) -> GPT:
    """Load a model and quantize the linear layers of its blocks to 4 bits, as in QLoRA training; None: not quantized.

    ``dtype`` applies to the other weights; adapters stay fp32. Weights are quantized one by one from the file's dtype:
    nothing is rounded twice, and the device never holds the unquantized model.
    """
    if kind is None:
        return load_model(folder, device, dtype, base_checkpoint_dir)
    model = load_model(folder, base_checkpoint_dir=base_checkpoint_dir, quantize=kind)
    quantize_linears(model, kind, device=device)
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(device, None if is_adapter(name) else dtype)
    model.to(device)  # the buffers
    pad_head(model)
    return model
