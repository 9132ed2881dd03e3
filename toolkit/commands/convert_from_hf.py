"""`toolkit convert_from_hf`: convert a Hugging Face folder to a checkpoint folder."""

from typing import Literal

from toolkit.errors import notice


def setup(
    hf_dir: str,
    out_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Convert a Hugging Face folder of any supported architecture, as specified by config.json, to a checkpoint folder.

    Also copies all files of the tokenizer, the chat template and generation_config.json. A SentencePiece
    tokenizer.model without a tokenizer.json is converted.

    Args:
        hf_dir: Folder with config.json and weights: safetensors, or pickles (.bin) loaded without running code, in one
            file or in several with an index.
        out_dir: The new folder; an existing one must be empty. Commands find folders below checkpoints/ by name.
        dtype: Dtype of the weights. Default: unchanged.
        verify_checkpoint: Verify checksums first, from SHA256SUMS (in exports) and from the hub (in downloads). Damaged
            weights are an error, other damaged files a warning; false accepts all.
    """
    import torch

    from toolkit.checkpoints.hf.import_hf import import_hf

    for line in import_hf(hf_dir, out_dir, None if dtype is None else getattr(torch, dtype), verify_checkpoint):
        notice(line)
    print(f"wrote {out_dir}")
