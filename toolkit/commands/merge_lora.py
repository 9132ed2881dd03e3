"""`toolkit merge_lora`: adapters become plain weights."""

from __future__ import annotations

from typing import Literal


def setup(
    checkpoint_dir: str,
    out_dir: str | None = None,
    base_checkpoint_dir: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    verify: bool = False,
    verify_checkpoint: bool = True,
) -> None:
    """Write W + scaling B A: computed in float32 and rounded once, to the type of the base's weights or to --dtype.

    Runs on the CPU, with a few weights in memory at a time. What was trained on a quantised base is merged into the
    base as it is on disk.

    Args:
        checkpoint_dir: The adapters: a checkpoint folder of finetune_lora, or a name below checkpoints/.
        out_dir: A new folder for the merged model; else its weights go beside the adapters, where they win.
        base_checkpoint_dir: The base model; the folder that it had in training when not given.
        dtype: Type of all weights; that of the base's when not given.
        verify: Compare the logits of the merged weights with those of base and adapters apart, in float32.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
    """
    import sys
    from pathlib import Path

    import torch

    from toolkit.checkpoints.finite import nonfinite_warning
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.merge import logit_difference, merge_beside, merge_to
    from toolkit.checkpoints.store import WEIGHTS

    folder, wanted = find_checkpoint_dir(checkpoint_dir), None if dtype is None else getattr(torch, dtype)
    if verify_checkpoint:
        require_intact_model(folder, base_checkpoint_dir)
    if out_dir is None:
        merged = merge_beside(folder, base_checkpoint_dir, wanted)
        print(f"wrote {folder / WEIGHTS}")
    else:
        merged = merge_to(folder, Path(out_dir), base_checkpoint_dir, wanted)
        print(f"wrote {out_dir}")
    if merged.nonfinite:
        print(nonfinite_warning(merged.nonfinite, folder if out_dir is None else out_dir), file=sys.stderr)
    print(f"base: {merged.info.base}, fingerprint {merged.info.base_hash[:16]}")
    if merged.info.quantize is not None:
        print(f"trained on that base quantised to {merged.info.quantize}; merged into its own weights")
    if verify:
        difference = logit_difference(folder, folder if out_dir is None else Path(out_dir), base_checkpoint_dir)
        print(f"largest difference of the logits, relative to the largest logit: {difference:.1e}")
