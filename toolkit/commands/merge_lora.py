"""`toolkit merge_lora`: merge adapters into the base's weights."""

from pathlib import Path
from typing import Literal

from toolkit.checkpoints.store import WEIGHTS
from toolkit.errors import require_option
from toolkit.io.paths import is_url


def setup(
    checkpoint_dir: str,
    out_dir: str | None = None,
    base_checkpoint_dir: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    verify: bool = False,
    verify_checkpoint: bool = True,
) -> None:
    """Merge adapters into weights: W + scaling B A in float32, rounded once to the base's dtype or --dtype.

    Runs on the CPU, with a few weights in memory at a time. Adapters trained on a quantized base are merged into the
    unquantized base on disk.

    Args:
        checkpoint_dir: A checkpoint folder of finetune_lora, or a name below checkpoints/.
        out_dir: A new folder for the merged model. Default: checkpoint_dir, whose merged weights then take precedence.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        dtype: Dtype of all weights. Default: the base's.
        verify: Compare the logits with and without merging, in float32.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    import torch

    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.merge import logit_difference, merge_in_place, merge_to

    require_option(
        out_dir is not None or not is_url(checkpoint_dir),
        "out_dir",
        out_dir,
        f"must be a local folder for the merged model of {checkpoint_dir}",
    )
    folder, target_dtype = find_checkpoint_dir(checkpoint_dir), None if dtype is None else getattr(torch, dtype)
    if verify_checkpoint:
        require_intact_model(folder, base_checkpoint_dir)
    target = folder if out_dir is None else Path(out_dir)
    if out_dir is None:
        merged = merge_in_place(folder, base_checkpoint_dir, target_dtype)
        print(f"wrote {folder / WEIGHTS}")
    else:
        merged = merge_to(folder, target, base_checkpoint_dir, target_dtype)
        print(f"wrote {out_dir}")
    print(f"base: {merged.info.base}, fingerprint {merged.info.base_hash[:16]}")
    if merged.info.quantize is not None:
        print(f"trained on that base quantized to {merged.info.quantize}; merged into the unquantized weights")
    if verify:
        difference = logit_difference(folder, target, base_checkpoint_dir)
        print(f"largest difference of the logits, relative to the largest logit: {difference:.1e}")
