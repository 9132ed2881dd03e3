"""`toolkit convert_to_peft`: export adapters to a folder that peft loads."""


def setup(
    checkpoint_dir: str,
    out_dir: str,
    base_checkpoint_dir: str | None = None,
    base_model: str | None = None,
    verify_checkpoint: bool = True,
) -> None:
    """Write adapter_model.safetensors, adapter_config.json and the tokenizer's files.

    Args:
        checkpoint_dir: A checkpoint folder of finetune_lora, or a name below checkpoints/.
        out_dir: The new folder.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        base_model: Hub name or Hugging Face folder of the base, for base_model_name_or_path. Default: where the base
            was imported from (download, convert_from_hf).
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
    """
    import shlex
    import sys
    from pathlib import Path

    from toolkit.checkpoints.finite import nonfinite_warning
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.peft.export_peft import export_peft

    folder = find_checkpoint_dir(checkpoint_dir)
    if verify_checkpoint:
        require_intact_model(folder, base_checkpoint_dir)
    exported = export_peft(folder, Path(out_dir), base_checkpoint_dir, base_model)
    if exported.nonfinite:
        print(nonfinite_warning(exported.nonfinite, out_dir), file=sys.stderr)
    print(f"wrote {out_dir}")
    print(f"base_model_name_or_path: {exported.base}")
    if not exported.has_known_base:
        print(
            f"warning: transformers cannot load {exported.base}, and no Hugging Face model is recorded for it; set "
            f"base_model_name_or_path in {out_dir}/adapter_config.json to its hub name or folder; "
            f"`toolkit convert_to_hf {shlex.quote(exported.base)} DIR` writes such a folder",
            file=sys.stderr,
        )
    if exported.wrapper_type is not None:
        print(
            f"for the {exported.wrapper_type} model with images; for the text model alone, merge "
            "(convert_to_hf --merge true)"
        )
    if not exported.is_checked:
        print("base not verified: its folder no longer exists; give its new location with --base_checkpoint_dir")
