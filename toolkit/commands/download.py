"""`toolkit download`: a model of the Hugging Face hub becomes a checkpoint folder."""

from __future__ import annotations

from typing import Literal


def setup(
    repo_id: str,
    out_dir: str | None = None,
    revision: str = "main",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    convert: bool = True,
) -> None:
    """Fetch a model from the Hugging Face hub and write a checkpoint folder from it.

    Only safetensors, config.json and the files of the tokenizer are fetched. When it is interrupted,
    files that have arrived whole are kept and the same command fetches the others. For gated and private models log in
    with `hf auth login` or set HF_TOKEN; HF_ENDPOINT names another hub.

    Args:
        repo_id: The model's name on the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct.
        out_dir: The new folder; one that is there must be empty. checkpoints/<repo_id> when not given, where commands
            find it by repo_id.
        revision: A branch, a tag or a commit; which commit it was is kept in download.yaml.
        dtype: Type of the weights; as they are when not given.
        convert: Write a checkpoint folder; false leaves the files as they are on the hub.
    """
    import sys
    from pathlib import Path

    from toolkit.errors import UserError

    if dtype is not None and not convert:
        raise UserError(f"--dtype {dtype}: would have no effect with --convert false; leave it out")

    import torch

    from toolkit.checkpoints.hub import download

    target = Path("checkpoints") / repo_id if out_dir is None else Path(out_dir)
    for line in download(repo_id, target, revision, None if dtype is None else getattr(torch, dtype), convert):
        print(line, file=sys.stderr)
    print(f"wrote {target}")
