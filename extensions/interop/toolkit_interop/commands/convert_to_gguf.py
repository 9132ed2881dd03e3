"""`toolkit convert_to_gguf`: export a checkpoint for llama.cpp and Ollama."""

from pathlib import Path
from typing import Literal

from toolkit.errors import notice


def setup(
    checkpoint_dir: str,
    out_path: str,
    dtype: Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4"] = "F16",
    merge: bool = False,
    base_checkpoint_dir: str | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Write one GGUF file with weights, tokenizer and chat template, and a Modelfile for Ollama next to it.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/.
        out_path: The new file. Where its folder has a Modelfile, the new one is NAME.Modelfile.
        dtype: Type of the matrices; norms and biases are always F32. Bits per weight: Q8_0 8.5, Q5_1 6, Q5_0 5.5,
            Q4_1 5, Q4_0 4.5, MXFP4 4.25; in files of 4 and 5 bits, token embeddings and output are Q8_0.
        merge: Merge LoRA adapters during the export if the checkpoint holds no merged weights.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    from toolkit.checkpoints.folder import find_model
    from toolkit_interop.gguf.export_gguf import export_gguf

    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    for warning in export_gguf(folder, Path(out_path), dtype, merge, base_checkpoint_dir):
        notice(warning)
    print(f"wrote {out_path}")
