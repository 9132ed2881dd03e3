"""`toolkit convert_to_peft`: export adapters to a folder that peft loads."""

from pathlib import Path

from toolkit.errors import notice, require_option
from toolkit.escape import shell_word


def setup(
    checkpoint_dir: str,
    out_dir: str,
    base_checkpoint_dir: str | None = None,
    base_model: str | None = None,
    verify_checkpoint: bool = True,
    push_to_hub: str | None = None,
    private: bool = True,
) -> None:
    """Write adapter_model.safetensors, adapter_config.json and the tokenizer's files.

    Args:
        checkpoint_dir: A checkpoint folder of finetune_lora, or a name below checkpoints/.
        out_dir: The new folder.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        base_model: Hub name or Hugging Face folder of the base, for base_model_name_or_path. Default: where the base
            was imported from (download, convert_from_hf).
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        push_to_hub: Also upload the folder to this hub repository, USER/NAME, which is created if needed. Needs a token
            in HF_TOKEN, or from `hf auth login`.
        private: Visibility of the repository; false makes it public.
    """
    from toolkit.checkpoints.find import CONFIG, read_settings
    from toolkit.checkpoints.folder import find_checkpoint_dir, require_intact_model
    from toolkit.checkpoints.hf.push import push_folder, require_target
    from toolkit_interop.peft.export_peft import export_peft

    require_target(push_to_hub, private)
    folder = find_checkpoint_dir(checkpoint_dir)
    if verify_checkpoint:
        require_intact_model(folder, base_checkpoint_dir)
    exported = export_peft(folder, Path(out_dir), base_checkpoint_dir, base_model)
    print(f"wrote {out_dir}")
    print(f"base_model_name_or_path: {exported.base}")
    if not exported.has_known_base:
        # adapters belong to the weights before quantization
        options = " --quantize none" if read_settings(Path(exported.base), CONFIG).get("qat") else ""
        notice(
            f"warning: transformers cannot load {exported.base}, and no Hugging Face model is recorded for it; set "
            f"base_model_name_or_path in {out_dir}/adapter_config.json to its hub name or folder; "
            f"`toolkit convert_to_hf {shell_word(exported.base)} DIR{options}` writes such a folder"
        )
    if exported.wrapper_type is not None:
        print(
            f"for the {exported.wrapper_type} model with images; for the text model alone, merge "
            "(convert_to_hf --merge true)"
        )
    if exported.has_tied_head:
        print(
            "note: the adapted head is tied to the embedding, so merging in peft changes both; use toolkit merge_lora"
        )
    if not exported.is_checked:
        print("base not verified: its folder no longer exists; give its new location with --base_checkpoint_dir")
    if push_to_hub is not None:
        is_on_hub = exported.has_known_base and not Path(exported.base).is_dir()
        hint = f"not uploaded: the base {exported.base} is a local folder; give its name on the hub with --base_model"
        require_option(is_on_hub, "push_to_hub", push_to_hub, hint)
        print(f"uploaded to {push_folder(Path(out_dir), push_to_hub, private)}")
