"""`toolkit convert_from_hf`: a Hugging Face folder becomes a checkpoint folder."""

from __future__ import annotations

from typing import Literal


def setup(
    hf_dir: str,
    out_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
) -> None:
    """Write a checkpoint folder from a Hugging Face folder of any supported architecture, as its config.json says.

    All files of the tokenizer, the chat template and generation_config.json come along; where SentencePiece's
    tokenizer.model stands alone, a tokenizer.json is made of it.

    Args:
        hf_dir: The folder that holds config.json and the weights: safetensors, or pickles (.bin) that run no code, in
            one file or in several with an index.
        out_dir: The new folder; one that is there must be empty. Below checkpoints/, commands find it by its name.
        dtype: Type of the weights; as they are when not given.
    """
    import sys

    import torch

    from toolkit.checkpoints.import_hf import import_hf

    for line in import_hf(hf_dir, out_dir, None if dtype is None else getattr(torch, dtype)):
        print(line, file=sys.stderr)
    print(f"wrote {out_dir}")
