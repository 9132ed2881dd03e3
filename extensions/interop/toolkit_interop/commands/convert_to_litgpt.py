"""`toolkit convert_to_litgpt`: export a checkpoint for LitGPT."""

from pathlib import Path

from toolkit.errors import notice


def setup(
    checkpoint_dir: str,
    out_dir: str,
    merge: bool = False,
    base_checkpoint_dir: str | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Write a folder that LitGPT 0.5.13 opens: lit_model.pth, model_config.yaml and the tokenizer's files.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/.
        out_dir: The new folder; an existing one must be empty.
        merge: Merge LoRA adapters during the export if the checkpoint holds no merged weights.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    from toolkit.checkpoints.folder import find_model
    from toolkit_interop.export_litgpt import export_litgpt

    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    export_litgpt(folder, Path(out_dir), merge, base_checkpoint_dir)
    if not (Path(out_dir) / "tokenizer.json").exists():
        notice(f"warning: {folder} holds no tokenizer.json: copy one into {out_dir}")
    print(f"wrote {out_dir}")
