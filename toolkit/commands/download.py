"""`toolkit download`: download a model from the Hugging Face hub."""

from pathlib import Path
from typing import Literal

from toolkit.errors import UserError, notice


def setup(
    repo_id: str,
    out_dir: str | None = None,
    revision: str = "main",
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    convert: bool = True,
    tokenizer_only: bool = False,
) -> None:
    """Download a model from the Hugging Face hub and convert it to a checkpoint folder.

    Downloads only safetensors, config.json and the files of the tokenizer. After an interruption, complete files are
    kept and the same command downloads the others. For gated and private models log in with `hf auth login` or set
    HF_TOKEN; HF_ENDPOINT selects another hub.

    Args:
        repo_id: The model's name on the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct.
        out_dir: The new folder; an existing one must be empty. Default: checkpoints/<repo_id>, where commands find it
            by repo_id; a model that is there is left as it is.
        revision: A branch, a tag or a commit; download.yaml records the commit.
        dtype: Dtype of the weights. Default: unchanged.
        convert: Convert to a checkpoint folder; false keeps the files as they are on the hub.
        tokenizer_only: Download only the files of the tokenizer, for --tokenizer_dir.
    """
    if dtype is not None and (tokenizer_only or not convert):
        what = "--tokenizer_only" if tokenizer_only else "--convert false"
        raise UserError(f"--dtype {dtype}: has no effect with {what}; remove it")
    if tokenizer_only and not convert:
        raise UserError("--convert false: has no effect with --tokenizer_only; remove it")

    target = Path(out_dir or f"checkpoints/{repo_id}")
    holds = target / ("tokenizer.json" if tokenizer_only else "model_config.yaml")
    if convert and revision == "main" and not (out_dir or dtype) and holds.is_file():
        return print(f"{target} exists; to download it again, remove it")

    import torch

    from toolkit.checkpoints.hf.hub import download

    torch_dtype = None if dtype is None else getattr(torch, dtype)
    for line in download(repo_id, target, revision, torch_dtype, convert, tokenizer_only):
        notice(line)
    print(f"wrote {target}")
