"""A ``config.json`` gives the results of transformers, or is rejected in one line that names the key."""

import functools
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.cases import check_each, has_slow_tests
from helpers.tiny_configs import GEMMA4, HF_CONFIGS, LINEAR_MOE, LLAMA, MROPE
from helpers.tiny_configs import LINEAR as DELTA_NET
from helpers.tiny_models import from_folder, randomize, relative_error, token_ids
from safetensors.torch import save_file

from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.errors import UserError
from toolkit.models.families import FAMILIES, MULTIMODAL, config_from_hf, family_of, get_config
from toolkit.models.gpt import GPT
from toolkit.models.rope import attention_factor, inverse_frequencies

transformers = pytest.importorskip("transformers")

GROUPED = {**LLAMA, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8}
LINEAR = {"rope_type": "linear", "factor": 2.0}
GEMMA3 = {
    **GROUPED, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 20,
    "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 50.0,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
NEOX = {**LLAMA, "hidden_act": "gelu"}
GPT2 = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64}  # fmt: skip
MISTRAL = {**GROUPED, "sliding_window": 16}

COMPUTED = {
    "rope_scaling and rope_parameters": ("qwen2", GROUPED | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": {"type": "yarn"} | YARN}),
    "the base next to them": ("llama", GROUPED | {"rope_theta": 500.0, "rope_scaling": LINEAR}),
    "yarn, the context next to it": ("llama", GROUPED | {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16}),
    "yarn, the context twice": ("mistral", MISTRAL | {
        "rope_scaling": {"rope_type": "yarn"} | YARN, "original_max_position_embeddings": 8}),
    "yarn with nulls": ("llama", GROUPED | {
        "rope_scaling": {"rope_type": "yarn", "beta_fast": None, "attention_factor": None, "finetuned": True} | YARN}),
    "llama3, the context nowhere": ("llama", GROUPED | {"rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    "longrope with a factor": ("llama", GROUPED | {
        "rope_scaling": {"rope_type": "longrope", "factor": 7.0, "original_max_position_embeddings": 32} | LONG}),
    "phi3, longrope with a factor": ("phi3", GROUPED | {
        "rope_scaling": {"type": "longrope", "factor": 7.0} | LONG, "original_max_position_embeddings": 32}),
    "phi3, longrope with a factor of attention": ("phi3", GROUPED | {
        "rope_scaling": {"type": "longrope", "attention_factor": 2.0} | LONG, "original_max_position_embeddings": 32}),
    "phi3, longrope called yarn": ("phi3", GROUPED | {
        "rope_scaling": {"type": "yarn"} | LONG, "original_max_position_embeddings": 32}),
    "phi, the share in rope_scaling": ("phi", LLAMA | {
        "hidden_act": "gelu_new", "rope_scaling": {"partial_rotary_factor": 0.25} | LINEAR}),
    "gemma3, a cap of the scores": ("gemma3_text", GEMMA3 | {
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3, rope_scaling over rope_parameters": ("gemma3_text", GEMMA3 | {
        "rope_parameters": {FULL: {"rope_theta": 500.0}, SLIDING: {}}, "rope_scaling": LINEAR}),
    "gpt_neox without rotation": ("gpt_neox", NEOX | {"rotary_pct": 0.0}),
    "gpt2 in the words of others": ("gpt2", GPT2),
    "gpt2 with heads twice": ("gpt2", GPT2 | {"n_head": 8}),
    "attention_dropout": ("qwen2", GROUPED | {"attention_dropout": 0.1}),
    "hunyuan, a constant factor of theta": ("hunyuan_v1_dense", GROUPED | {
        "head_dim": 16, "rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}}),
    "exaone4, a pattern in words": ("exaone4", GROUPED | {
        "sliding_window": 16, "sliding_window_pattern": "LG", "layer_types": [SLIDING, FULL]}),
    "cohere2, a pattern": ("cohere2", GROUPED | {"sliding_window": 16, "sliding_window_pattern": 2}),
    "apertus without RoPE's keys": ("apertus", GROUPED | {"hidden_act": "xielu", "max_position_embeddings": 65536}),
    "qwen2, windows without a width": ("qwen2", GROUPED | {
        "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTED)
def test_config_json_variants_match_transformers(case, tmp_path):
    kind, values = COMPUTED[case]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | values))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(reference, seed=0)
    reference.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | values))
    with torch.no_grad():
        assert relative_error(from_folder(tmp_path)(token_ids()), reference(token_ids()).logits) < 1e-5


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_are_exported_for_code_that_reads_max_window_layers(kind):
    """Code from before layer_types gives layers from max_window_layers on a window."""
    for first in range(4):
        values = GROUPED | {"model_type": kind, "num_hidden_layers": 3, "sliding_window": 16}
        config = config_from_hf(values | {"use_sliding_window": True, "max_window_layers": first})
        exported = family_of(config).to_hf_config(config)
        assert exported["max_window_layers"] == first
        assert exported["layer_types"] == [FULL] * first + [SLIDING] * (3 - first)


def nested(kind: str, scaling: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: {}} | {kind: scaling}}


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen2", {"is_causal": False}, "is_causal False: of a 'qwen2' model"),
        ("gpt2", {"is_causal": False}, "is_causal False"),
        ("llama", {"per_layer_config": {"0": {}}}, "per_layer_config"),
        (
            "qwen2", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn"} | YARN},
            r"rope_parameters.rope_theta 1000000.0: is ignored; set it in rope_scaling",
        ),
        ("qwen2", {"rope_parameters": {FULL: {"rope_theta": 1e6}}}, "full_attention .*: a 'qwen2' model has the same"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: a 'llama' model has no partial rotary"),
        ("llama", {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ("llama", {"rope_scaling": {"rope_type": None, "factor": 2.0}}, "rope_type None is not supported"),
        ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": None}}, "factor is missing; rope_type 'linear'"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor '4': must be a number"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"} | LONG | {"short_factor": [1.0] * 5}}, ".*has 5"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"} | LONG | {"short_factor": "1"}}, ".*short_factor '1'"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}},
            "high_freq_factor 4.0: must be greater than low_freq_factor",
        ),
        ("llama", {"rope_theta": None}, "rope_theta None: must be a number greater than zero"),
        ("gpt_neox", {"rope_theta": 77.0}, "rope_theta 77.0: a 'gpt_neox' model uses rotary_emb_base 10000.0"),
        ("gpt_neox", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5: a 'gpt_neox' model uses rotary_pct"),
        ("gpt_neox", {"head_dim": 32}, "head_dim 32: .* 'gpt_neox' only has 16; other values are not supported"),
        ("falcon", {"head_dim": 32}, "head_dim 32: .* only has 16"),
        ("phi", {"head_dim": 32}, "head_dim 32: .* only has 16"),
        ("gemma3_text", nested(SLIDING, LINEAR), "rope_type 'linear' of sliding_attention: .* only 'default' there"),
        ("olmo3", nested(SLIDING, {"rope_type": "yarn"} | YARN), "rope_type 'yarn' of sliding_attention"),
        ("olmo3", nested(FULL, {"rope_type": "yarn", "truncate": False} | YARN), "truncate False"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 77.0}}, "rope_parameters.rope_theta 77.0: .* must hold"),
        ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling.type 'linear': .* rename"),
        ("olmo3", {"rope_theta": 77.0}, "rope_theta 77.0: transformers 4 applies it to all layers"),
        ("deepseek_v3", {"num_key_value_heads": 4, "rope_scaling": LINEAR | {"mscale_all_dim": 1.0}}, "mscale_al"),
        ("deepseek_v2", {"num_key_value_heads": 4, "head_dim": 32}, "head_dim 32"),
        ("llama", {"mlp_bias": True}, "attention_bias False with mlp_bias True"),
        ("seed_oss", {"mlp_bias": True}, "attention_bias True with mlp_bias True: .* with all biases"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0: of a 'olmoe' model, this version computes only None"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm True: of a 'cohere2' model"),
        ("cohere2", {"head_dim": 32}, "head_dim 32: .* only has 16"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern 0: must be an integer, 1 or greater"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern 'LLLG': must be an integer"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha -1.0: must be a number"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not"),
        ("apertus", {"hidden_act": "silu"}, "hidden_act 'silu': of a 'apertus' model"),
        ("apertus", {"hidden_act": "xielu", "rope_theta": 5e5}, "rope_theta 500000.0: transformers ignores it"),
        ("cohere2", {"logit_scale": 0}, "logit_scale 0: must be a number greater than zero"),
        ("cohere2", {"sliding_window": None}, "sliding_window None: must be greater than zero"),
        ("granite", {"mlp_bias": True}, "attention_bias False with mlp_bias True"),
        ("mistral", {"layer_types": [FULL] * 2}, "layer_types"),
        ("mistral", {"sliding_window": 0}, "sliding_window 0: must be greater than zero"),
        ("gemma2", {"sliding_window": None}, "sliding_window None: must be greater than zero"),
        ("gemma2", {"query_pre_attn_scalar": 20.5}, "query_pre_attn_scalar 20.5: must be an integer"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping 0.0: must be greater than zero"),
        ("qwen2", {"use_sliding_window": True, "layer_types": [SLIDING]}, "layer_types names 1 layers: must be"),
        ("qwen2", {"sliding_window": 8, "layer_types": [SLIDING] * 2}, "use_sliding_window False: layer_types has"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers \[1\]: must contain 0 or 1 for each of the 2 layers"),
        ("qwen2", {"num_hidden_layers": "2"}, "num_hidden_layers '2': must be an integer, 1 or greater"),
        ("qwen2", {"hidden_size": 65}, "hidden_size 65: must be a multiple of num_attention_heads 4"),
        ("qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings 'false': must be true or false"),
        ("qwen2", {"rms_norm_eps": None}, "rms_norm_eps None: must be a number"),
        ("qwen2", {"vocab_size": None}, "vocab_size None: must be an integer"),
        ("qwen2", {"intermediate_size": None}, "intermediate_size None: must be an integer"),
        ("qwen2", {"max_position_embeddings": None}, "max_position_embeddings None: must be an integer"),
    ],
)  # fmt: skip
def test_unsupported_values_name_the_config_json_key(kind, change, message):
    head_dim = {"head_dim": 16} if kind.startswith("gemma") else {}
    with pytest.raises(UserError, match=f"^config.json: {message}"):
        config_from_hf({"model_type": kind} | GROUPED | head_dim | {"hidden_act": acts(kind)} | change)


def acts(kind: str) -> str:
    return {"phi": "gelu_new", "gpt_neox": "gelu"}.get(kind, "silu")


@functools.cache
def files() -> dict[str, dict[str, Any]]:
    """Return a ``config.json`` of each family with all keys that transformers or toolkit writes."""
    found: dict[str, dict[str, Any]] = {}
    for make in HF_CONFIGS.values():
        reference = json.loads(make().to_json_string(use_diff=False))
        kind = reference["model_type"]
        if kind not in found:
            found[kind] = family_of(config := config_from_hf(reference)).to_hf_config(config) | reference
    return found


@pytest.mark.slow
def test_any_value_of_any_key_is_accepted_or_a_user_error():
    found, tried = files(), 0
    assert found.keys() == FAMILIES.keys()
    for kind, values in found.items():
        plain = config_from_hf(values)
        for key in values.keys() - {"model_type", "transformers_version"}:
            for value in (None, "64", "x", 2.5, 0, -1, [], [1], {}, {"x": 1}, True, False, float("nan"), float("inf")):
                tried += 1
                try:
                    config = config_from_hf(values | {key: value})
                except UserError as error:
                    assert str(error).startswith("config.json: ") and "\n" not in str(error), (kind, key, value)
                    assert "--model_config" not in str(error), error
                    continue
                if config != plain:
                    with torch.device("meta"):
                        GPT(config)
    assert tried > 10000


SCALINGS = [
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **YARN},
    {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "mscale": 1.0,
     "mscale_all_dim": 1.0, "truncate": True, **YARN},
    {"rope_type": "longrope", "attention_factor": 1.0, **LONG, **YARN},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt_neox", "gemma3_text", "olmo3", "deepseek_v3", "gpt_oss"])
def test_any_rope_value_is_accepted_or_a_user_error(kind):
    plain = {key: value for key, value in files()[kind].items() if not key.startswith("rope")}
    for scaling in SCALINGS:
        for key in scaling:
            for value in (None, "64", "x", 0, -1, 1, 2.5, [], [1], {}, {"x": 1}, True, float("nan"), float("inf")):
                changed = scaling | {key: value}
                for rotary in ({"rope_scaling": changed}, {"rope_parameters": changed}, nested(FULL, changed)):
                    try:
                        config = config_from_hf(plain | rotary)
                    except UserError as error:
                        assert str(error).startswith("config.json: ") and "--model_config" not in str(error)
                        continue
                    assert inverse_frequencies(config).isfinite().all() and math.isfinite(attention_factor(config))


# Keys whose absence toolkit rejects, where transformers would read another model than was written.
EXPECTED_REJECTIONS = {("gpt_oss", "rope_theta"), ("deepseek_v3", "rope_theta"), ("olmo3", "rope_parameters"),
        ("deepseek_v2", "qk_rope_head_dim"), ("glm4_moe_lite", "qk_rope_head_dim"),
        ("apertus", "rope_theta")}  # fmt: skip


@pytest.mark.slow
def test_missing_keys_have_the_defaults_of_transformers(tmp_path):
    different = set()
    for kind, values in files().items():
        for key in values.keys() - {"model_type", "architectures", "transformers_version"}:
            fewer = {k: v for k, v in values.items() if k != key}
            (tmp_path / "config.json").write_text(json.dumps(fewer))
            try:
                reference = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
            except Exception:  # transformers does not read the file, with any error
                continue
            try:
                reference = replace(config_from_hf(reference), name="")
            except UserError:  # transformers' default does not match the other keys
                continue
            try:
                same = config_from_hf(fewer) == reference
            except UserError as error:
                same = "is missing; a" in str(error)
            if not same:
                different.add((kind, key))
    assert different == EXPECTED_REJECTIONS


# the others have another key, or as many as query heads
OWN_KEY_VALUE_HEADS = [
    kind for kind in FAMILIES if not kind.startswith(("gpt2", "gpt_neox", "falcon", "deepseek", "glm4_moe_lite"))
]


@pytest.mark.parametrize("kind", OWN_KEY_VALUE_HEADS)
def test_missing_num_key_value_heads_has_the_default_of_transformers(kind, tmp_path):
    values = {key: value for key, value in files()[kind].items() if key not in ("num_key_value_heads", "head_dim")}
    n_head = 2 * transformers.AutoConfig.for_model(kind).get_text_config().num_attention_heads
    values |= {"model_type": kind, "num_attention_heads": n_head, "hidden_size": 16 * n_head}
    (tmp_path / "config.json").write_text(json.dumps(values))
    reference = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config_from_hf(values).n_query_groups == reference.num_key_value_heads


GEMMA_3_12B = {  # google/gemma-3-12b-it, without the sizes of its vision model
    "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
    "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
    "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"model_type": "siglip_vision_model"},
    "text_config": {
        "hidden_size": 3840, "intermediate_size": 15360, "model_type": "gemma3_text", "num_attention_heads": 16,
        "num_hidden_layers": 48, "num_key_value_heads": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}  # fmt: skip


GLM_4_5_AIR = {  # from a log of ms-swift
    "attention_bias": True, "attention_dropout": 0.0, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072, "model_type": "glm4_moe",
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 1000000, "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1,
    "use_qk_norm": False, "vocab_size": 151552,
}  # fmt: skip
GLM_4_5 = {
    "first_k_dense_replace": 3, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "num_hidden_layers": 92, "routed_scaling_factor": 2.5, "use_qk_norm": True,
}  # fmt: skip
GLM_4_7_FLASH = {  # from vLLM's tests
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752, "model_type": "glm4_moe_lite",
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000.0, "routed_scaling_factor": 1.8,
    "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values"),
    [("GLM-4.5-Air", GLM_4_5_AIR), ("GLM-4.5", GLM_4_5_AIR | GLM_4_5), ("GLM-4.7-Flash", GLM_4_7_FLASH)],
)
def test_published_files_of_glm_give_the_named_configuration(name, values):
    config = config_from_hf(values)
    assert replace(get_config(name), name="", router_aux_loss_coef=0.0, padding_multiple=64) == config
    written = family_of(config).to_hf_config(config)
    assert {key for key in values.keys() & written.keys() if written[key] != values[key]} <= {
        "num_nextn_predict_layers"
    }


def test_layers_without_experts_of_glm_4_7_flash_are_listed():
    with pytest.raises(UserError, match="first_k_dense_replace 2: transformers ignores it; mlp_layer_types must"):
        config_from_hf(GLM_4_7_FLASH | {"first_k_dense_replace": 2})
    with pytest.raises(UserError, match="mlp_layer_types .*must be dense or sparse for each of the 47 layers"):
        config_from_hf(GLM_4_7_FLASH | {"mlp_layer_types": ["dense"]})
    dense_last = config_from_hf(GLM_4_7_FLASH | {"mlp_layer_types": ["sparse"] * 46 + ["dense"]})
    assert "first_k_dense_replace" not in family_of(dense_last).to_hf_config(dense_last)


def test_text_model_of_multimodal_config_is_read():
    read, named = config_from_hf(GEMMA_3_12B), get_config("gemma-3-12b")
    vocabulary = {"name": "", "vocab_size": 262208, "padded_vocab_size": 262208}  # with the image tokens
    assert read == replace(named, **vocabulary)
    small = {"model_type": "mistral3", "text_config": GROUPED | {"model_type": "mistral"}, "vision_config": {}}
    assert config_from_hf(small) == config_from_hf(GROUPED | {"model_type": "mistral"})
    with pytest.raises(UserError, match="'llava' is not supported: it is multimodal; save .*'mistral'"):
        config_from_hf({"model_type": "llava", "text_config": {"model_type": "mistral"}})
    with pytest.raises(UserError, match="'mistral3' is not supported: .*; the closest that is: 'mistral'"):
        config_from_hf({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}})
    with pytest.raises(UserError, match="'qwen2_vl' is not supported: it is multimodal; use a text-only model"):
        config_from_hf({"model_type": "qwen2_vl", "vision_config": {}})
    with pytest.raises(UserError, match="^config.json: is_causal False: of a 'gemma3_text' model"):
        config_from_hf(GEMMA_3_12B | {"is_causal": False})


REASONS = {
    "mamba2": "state space layers; only", "bart": "an encoder; ", "deepseek_v32": "sparse attention; .*: 'deepseek_v3'",
    "olmo_hybrid": "linear attention of another kind; the closest that is: 'olmo'", "lfm2": "convolutions; ",
    "glm4v_moe": ".*'glm4'",
    "qwen4_exp": "multimodal, and its text model's model_type 'qwen4_exp_text' .*attention of another kind; .*'qwen3'",
    "gemma3n": "multimodal, .*'gemma3n_text' is not supported; .*: 'gemma3_text'", "rwkv": "recurrent layers; ",
}  # fmt: skip


def test_unsupported_types_say_the_reason_and_the_closest_type(request):
    """Of every type that transformers lists."""
    auto = transformers.models.auto.modeling_auto
    listed = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}

    def check(kind):
        try:
            values = transformers.AutoConfig.for_model(kind).to_dict()
        except Exception:
            return  # some have no valid defaults
        if values["model_type"] != kind:
            return  # another name of a class, such as gpt-sw3
        words = f"^config.json: model_type '{kind}' is not supported.*{REASONS.get(kind, '')}"
        with pytest.raises(UserError, match=words):
            config_from_hf(values)

    check_each(check, sorted(listed - FAMILIES.keys() - MULTIMODAL.keys()) if has_slow_tests(request) else REASONS)


def save_multimodal_model(folder, kind):
    """Save a random multimodal Gemma 3 or 4, Ministral 3 or Qwen3.5 with transformers."""
    images = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 8}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config={key: value for key, value in GEMMA3.items() if not key.startswith("rope")}, vision_config=images,
        mm_tokens_per_image=4, image_token_index=95, boi_token_index=94, eoi_token_index=93,
    )  # fmt: skip
    if kind == "mistral3":
        text = GROUPED | {"model_type": "ministral3", "head_dim": 16, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "yarn", "llama_4_scaling_beta": 0.5, "rope_theta": 500.0, **YARN}}  # fmt: skip
        vision = images | {"model_type": "pixtral", "head_dim": 16}
        config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    if kind.startswith("qwen3_5"):
        text = (DELTA_NET if kind == "qwen3_5" else LINEAR_MOE) | {"rope_parameters": MROPE}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
        config = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    if kind == "gemma4":
        audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 32,
                 "subsampling_conv_channels": [8, 4]}  # fmt: skip
        text = GEMMA4 | {"num_kv_shared_layers": 3, "pad_token_id": 0, "use_bidirectional_attention": "vision"}
        vision = {key: value for key, value in images.items() if not key.endswith("_size")} | {
            "hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
            "position_embedding_size": 64,
        }  # fmt: skip
        config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=audio)
    reference = transformers.AutoModelForImageTextToText.from_config(config).eval()
    randomize(reference, seed=0)
    reference.save_pretrained(folder)
    return reference


OTHERS = {
    "gemma4": r"audio_tower \(\d+\), embed_audio \(\d+\), embed_vision \(\d+\), vision_tower",
    **dict.fromkeys(["qwen3_5", "qwen3_5_moe"], "visual"),
    **dict.fromkeys(["gemma3", "mistral3"], r"multi_modal_projector \(\d+\), vision_tower"),
}


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "mistral3", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("named", ["as files are", "as in memory"])
def test_text_model_of_multimodal_model_has_equal_logits(kind, named, tmp_path):
    reference = save_multimodal_model(tmp_path / "hf", kind)
    if named == "as in memory":  # as in the published Qwen3.5, whose experts are stacked
        is_tied = reference.config.tie_word_embeddings
        weights = {n: tensor for n, tensor in reference.state_dict().items() if not is_tied or n != "lm_head.weight"}
        save_file(weights, tmp_path / "hf" / "model.safetensors")
    notes, ids = import_hf(tmp_path / "hf", tmp_path / "native"), token_ids() % 90
    dropped = rf"dropped \d+ weights that the text model does not use: {OTHERS[kind]} \(\d+\)"
    assert sum(re.fullmatch(dropped, note) is not None for note in notes) == 1
    assert any(re.fullmatch(rf"note: {kind} is multimodal; only its text model \(.*\) is read", note) for note in notes)
    native = load_model(tmp_path / "native").eval()
    export_hf(tmp_path / "native", tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        logits = reference(ids).logits
        assert relative_error(native(ids), logits) < 1e-5
        assert relative_error(back(ids).logits, logits) < 1e-5
