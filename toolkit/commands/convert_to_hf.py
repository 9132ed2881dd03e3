"""`toolkit convert_to_hf`: export a checkpoint to a Hugging Face folder."""

from pathlib import Path
from typing import Any, Literal

from toolkit.errors import GuardError, notice

# Wrong weights exceed it by orders of magnitude; correct ones stay far below. Both round the delta rule of linear
# attention in fp32, chunk by chunk, which some weights amplify.
MAX_DIFFERENCE, MAX_LINEAR_DIFFERENCE = 1e-4, 1e-3


def setup(
    checkpoint_dir: str,
    out_dir: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    verify: bool = False,
    merge: bool = False,
    base_checkpoint_dir: str | None = None,
    verify_checkpoint: bool = True,
    family_options: dict[str, Any] | None = None,
    push_to_hub: str | None = None,
    private: bool = True,
    quantize: Literal["none", "dense", "int4", "int8", "int8-int4"] | None = None,
) -> None:
    """Export a model for AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained.

    The folder is written atomically; with --verify true, only if transformers computes the same logits.

    Args:
        checkpoint_dir: A checkpoint folder, or a name below checkpoints/.
        out_dir: The new folder; an existing one must be empty.
        dtype: Dtype of the weights. Default: unchanged.
        verify: Load the result with transformers and compare its logits with toolkit's, on the CPU in float32.
        merge: Merge LoRA adapters during the export if the checkpoint holds no merged weights.
        base_checkpoint_dir: Base model of the adapters. Default: the path recorded in training.
        verify_checkpoint: Verify checksums before loading; false accepts edited files.
        family_options: Options of an extension's family to change, such as --family_options.NAME false. The checkpoint
            must have all weights of the changed model; other weights are not exported.
        push_to_hub: Also upload the folder to this hub repository, USER/NAME, which is created if needed. Needs a token
            in HF_TOKEN, or from `hf auth login`.
        private: Visibility of the repository; false makes it public.
        quantize: Format of the weights of linear layers, as compressed-tensors reads it: int4, int8, or int8-int4
            (inputs in int8 per token). dense: their quantized values in the dtype. none: before quantization. Default:
            what the model was trained with (--qat.weights); without training, weights are rounded to nearest.
    """
    import torch

    from toolkit.checkpoints.adapters import has_adapters_only
    from toolkit.checkpoints.folder import find_model, read_model_config
    from toolkit.checkpoints.hf.export_hf import export_hf, require_transformers, verify_hf
    from toolkit.checkpoints.hf.push import push_folder, require_target
    from toolkit.io.safe_parse import read_json_object

    require_target(push_to_hub, private)
    folder = find_model(checkpoint_dir, base_checkpoint_dir, verify_checkpoint)
    target_dtype = None if dtype is None else getattr(torch, dtype)
    if verify:
        require_transformers("--verify true", None if has_adapters_only(folder) else read_model_config(folder))

    def compare(exported_dir: Path) -> None:
        difference = verify_hf(folder, exported_dir, base_checkpoint_dir, quantize)
        layers = read_json_object(exported_dir / "config.json").get("layer_types") or ()
        limit = MAX_LINEAR_DIFFERENCE if "linear_attention" in layers else MAX_DIFFERENCE
        if not difference <= limit:  # nan included
            raise GuardError(
                f"transformers computes different logits: relative difference {difference:.1e} exceeds "
                f"{limit}; {out_dir} was not written (run without --verify to write it for debugging)"
            )
        print(f"largest difference of the logits, relative to the largest logit: {difference:.1e}")

    check = compare if verify else None
    export_hf(folder, out_dir, target_dtype, merge, base_checkpoint_dir, check, family_options, quantize=quantize)
    if not (Path(out_dir) / "tokenizer.json").exists():
        notice(f"warning: {folder} holds no tokenizer.json: copy one into {out_dir}")
    print(f"wrote {out_dir}")
    if push_to_hub is not None:
        print(f"uploaded to {push_folder(Path(out_dir), push_to_hub, private)}")
