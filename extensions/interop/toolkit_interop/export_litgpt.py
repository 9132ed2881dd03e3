"""Export to LitGPT: a folder with the weights, ``model_config.yaml`` and tokenizer files of LitGPT 0.5.13 (M2)."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from toolkit.checkpoints.finite import write_weights
from toolkit.checkpoints.folder import CONFIG
from toolkit.checkpoints.hf.export_hf import make_packing, read_model, write_config
from toolkit.checkpoints.merge import copy_files
from toolkit.checkpoints.scratch import mmap_copy
from toolkit.checkpoints.store import WEIGHTS, require_new_folder, write_model_folder
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.errors import UserError, notice
from toolkit.io.safe_parse import write_yaml
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import FAMILIES
from toolkit_interop.litgpt import config_from_litgpt

# Fields of LitGPT's Config with the same meaning here. A model that differs from the defaults in another field is
# refused; so are new fields, until they are listed.
_FIELDS = (
    "block_size", "vocab_size", "padding_multiple", "padded_vocab_size", "n_layer", "n_embd", "n_head", "head_size",
    "n_query_groups", "intermediate_size", "rotary_percentage", "rope_base", "rope_adjustments",
    "rope_local_base_freq", "rope_indices", "sliding_window_size", "sliding_window_indices", "attention_scores_scalar",
    "attention_logit_softcapping", "final_logit_softcapping", "norm_qk", "norm_qk_type", "scale_embeddings",
    "parallel_residual", "shared_attention_norm", "bias", "attn_bias", "lm_head_bias", "norm_class_name", "norm_eps",
    "norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", "mlp_class_name", "gelu_approximate", "n_expert",
    "n_expert_per_token", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
)  # fmt: skip
# Fields without effect on the logits of the export.
_IRRELEVANT = ("name", "family", "padding_multiple", "tie_embeddings", "router_aux_loss_coef")
# LitGPT derives Gemma's norm offset, OLMo's norms without weights and its own export from the start of the name.
_PREFIXES = {
    "gemma": "Gemma", "gemma2": "Gemma-2", "gemma3_text": "Gemma-3", "olmo": "OLMo", "olmo2": "OLMo-2", "phi": "phi",
    "phi3": "Phi-3", "qwen2": "Qwen2.5", "qwen3": "Qwen3", "qwen3_moe": "Qwen3", "falcon": "falcon",
}  # fmt: skip


def export_litgpt(
    checkpoint_dir: Path, out_dir: Path, merge: bool = False, base_checkpoint_dir: str | None = None
) -> None:
    """Write a new folder for LitGPT atomically, which is also a checkpoint folder of toolkit.

    A model that was trained with quantized weights gets their values.

    ``merge`` merges adapters into ``base_checkpoint_dir``, by default the base model recorded in training.

    Raises:
        UserError: LitGPT would compute the model differently.
    """
    require_new_folder(out_dir)
    config, weights = read_model(checkpoint_dir, merge, base_checkpoint_dir, None, is_text_model=True)
    if config.qat is not None:
        packing = make_packing(config, "dense", weights["transformer.wte.weight"].dtype)
        assert packing is not None
        notice(f"note: {packing.note}")
        config, weights = replace(config, qat=None), packing.dense(weights)
    try:
        values = litgpt_config(config)
    except UserError as error:
        instead = "run toolkit convert_to_hf, whose folder transformers and vLLM read"
        raise UserError(f"checkpoint_dir {checkpoint_dir}: LitGPT does not support {error}; {instead}") from error
    has_tokenizer = (checkpoint_dir / "tokenizer.json").is_file()
    tokenizer = Tokenizer.load(checkpoint_dir, flag="checkpoint_dir") if has_tokenizer else None

    def convert(path: Path) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.items():
            if ".mlp.experts." in name:
                for i, expert in enumerate(tensor):
                    yield name.replace(".experts.", f".experts.{i}."), mmap_copy(expert, path)
            elif not isinstance(weights, dict) or (name == "lm_head.weight" and config.tie_embeddings):
                yield name, mmap_copy(tensor, path)  # LitGPT does not tie weights
            else:
                yield name, tensor

    def write(tmp: Path) -> None:
        write_weights(convert(tmp / WEIGHTS), tmp / WEIGHTS, out_dir)
        write_yaml(tmp / CONFIG, values)
        copy_files(checkpoint_dir, tmp, FILE_PATTERNS)
        if tokenizer is not None:
            _write_tokenizer_config(tmp / "tokenizer_config.json", tokenizer)

    write_model_folder(out_dir, write)


def litgpt_config(config: ModelConfig) -> Fields:
    """Return the content of LitGPT's ``model_config.yaml``. Raise UserError that names the unsupported field."""
    family = f"the model type {config.family!r}"
    if config.family not in FAMILIES:
        raise UserError(family)
    name, prefix = config.name or config.family, _PREFIXES.get(config.family, "")
    if not name.lower().startswith(prefix.lower()):
        name = f"{prefix}-{name}"
    name = prefix + name[len(prefix) :].replace("Gemma", "gemma").replace("OLMo", "olmo")
    values = {"name": name, "hf_config": {}} | {field: getattr(config, field) for field in _FIELDS}
    if 1 not in (config.rope_indices or ()):
        values |= {"rope_local_base_freq": None, "rope_indices": None}
    unsupported = {
        "rope_adjustments": config.rope_kind not in (None, "linear", "llama3"),
        "norm_qk_type": config.norm_qk_type == "per_head",
        "mlp_class_name": config.mlp_class_name == "XieluMLP",
        "bias": config.bias and config.mlp_class_name == "LLaMAMoE",  # LitGPT's router has none
    }
    field = next((field for field, is_unsupported in unsupported.items() if is_unsupported), None)
    if field is None:
        expected, actual = _effective_values(config), _effective_values(config_from_litgpt(values))
        field = next((field for field in expected if actual[field] != expected[field]), None)
    if field is not None:
        value = config.rope_kind if field == "rope_adjustments" else getattr(config, field)
        raise UserError(f"{family} with {field} {value}")
    return values


def _effective_values(config: ModelConfig) -> Fields:
    """Return the fields that matter for the logits, with lists per layer in one form."""
    layers = range(config.n_layer)
    values = config.to_dict() | {
        "sliding_window_indices": [config.window(i) for i in layers],
        "rope_indices": [config.rope_index(i) for i in layers],
        "moe_indices": [config.has_experts(i) for i in layers],
    }
    unused = (*_IRRELEVANT, "sliding_window_size", *(() if 1 in values["rope_indices"] else ("rope_local_base_freq",)))
    return {field: value for field, value in values.items() if field not in unused}


def _write_tokenizer_config(path: Path, tokenizer: Tokenizer) -> None:
    """Complete the file: LitGPT requires tokenizer_class, and takes BOS and EOS from nowhere else."""
    values = tokenizer.settings(path.name)
    required = {
        "tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens
    }  # fmt: skip
    values |= {name: value for name, value in required.items() if values.get(name) is None}
    values["add_bos_token"] = tokenizer.adds_bos
    write_config(path, values)
