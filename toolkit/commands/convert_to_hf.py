"""`toolkit convert_to_hf`: a checkpoint folder becomes a Hugging Face folder."""

from __future__ import annotations

from typing import Literal

# Wrong weights differ by far more, and right ones by far less.
MAX_DIFFERENCE = 1e-4


def setup(
    checkpoint_dir: str,
    out_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    verify: bool = False,
    merge: bool = False,
    base_checkpoint_dir: str | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Write a folder that AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained load.

    The folder appears whole or not at all; with --verify true, only if transformers computes the same.

    Args:
        checkpoint_dir: The model: a checkpoint folder, or a name below checkpoints/.
        out_dir: The new folder; one that is there must be empty.
        dtype: Type of the weights; as they are when not given.
        verify: Load the result with transformers and compare its logits with this program's, on the CPU in float32.
        merge: Merge LoRA adapters that have no merged weights beside them on the way.
        base_checkpoint_dir: The base of such adapters; where it was in training when not given.
        verify_checkpoint: Compare files with their checksums before they are used; false also reads edited files.
    """
    import sys
    from pathlib import Path

    import torch

    from toolkit.checkpoints.export_hf import export_hf, require_transformers, verify_hf
    from toolkit.checkpoints.finite import nonfinite_warning
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.errors import GuardError

    folder = find_checkpoint_dir(checkpoint_dir)
    if verify_checkpoint:
        require_intact_model(folder, base_checkpoint_dir)
    wanted = None if dtype is None else getattr(torch, dtype)
    if verify:
        require_transformers()

    def compare(written: Path) -> None:
        difference = verify_hf(folder, written, base_checkpoint_dir)
        if not difference <= MAX_DIFFERENCE:  # nan included
            raise GuardError(
                f"transformers computes other logits: they differ by {difference:.1e} of the largest ({MAX_DIFFERENCE} "
                f"is allowed), so {out_dir} is not written; without --verify it is, to look into it"
            )
        print(f"largest difference of the logits, relative to the largest logit: {difference:.1e}")

    options = {"merge": merge, "base_checkpoint_dir": base_checkpoint_dir, "check": compare if verify else None}
    if nonfinite := export_hf(folder, out_dir, wanted, **options):
        print(nonfinite_warning(nonfinite, out_dir), file=sys.stderr)
    if not (Path(out_dir) / "tokenizer.json").exists():
        print(f"warning: {folder} holds no tokenizer.json: copy one into {out_dir}", file=sys.stderr)
    print(f"wrote {out_dir}")
