import dataclasses

import pytest
import torch

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf, family_of, get_config
from toolkit.models.gpt import GPT, model_on_meta


def test_exported_vocab_size_is_the_padded_one():
    config = ModelConfig(vocab_size=100)
    assert family_of(config).to_hf_config(config)["vocab_size"] == 128


LLAMA31 = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, "max_position_embeddings": 131072,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def test_old_and_new_rope_keys_are_equivalent():
    old = config_from_hf(LLAMA31 | {"rope_theta": 500000.0, "rope_scaling": SCALING})
    new = config_from_hf(LLAMA31 | {"rope_parameters": {**SCALING, "rope_theta": 500000.0}})
    assert old == new
    assert (old.rope_base, old.rope_adjustments["original_max_seq_len"]) == (500000.0, 8192)
    neox = {**LLAMA31, "model_type": "gpt_neox"}
    old = config_from_hf(neox | {"rotary_pct": 0.5, "rotary_emb_base": 500})
    new = config_from_hf(neox | {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500}})
    assert old == new
    assert (old.rope_base, old.rotary_percentage) == (500.0, 0.5)
    assert config_from_hf(neox).rotary_percentage == 0.25


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported: it has state space layers; only llama, .*, granite"),
        ({"model_type": "qwen"}, "'qwen' is not supported; the closest that is: 'qwen3'"),
        ({"model_type": "nemotron"}, "'nemotron' is not supported; only llama, .*"),
        ({"model_type": None}, "model_type None"),
        ({"model_type": ["llama"]}, "is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["linear_attention", "full_attention"]},
            "layer_types: 'linear_attention' is not supported",
        ),
        ({"model_type": "phi", "tie_word_embeddings": True}, "tie_word_embeddings True"),
        ({"model_type": "falcon", "alibi": True}, "alibi True"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act 'silu'"),
        ({"rope_parameters": "fast"}, "rope_parameters 'fast': must be a JSON object"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "attention_bias False with mlp_bias True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor is missing; rope_type 'yarn' needs it"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias"),
    ],
)
def test_unsupported_config_json_is_rejected(change, named):
    with pytest.raises(UserError, match=named):
        config_from_hf(LLAMA31 | change)


def test_missing_required_key_is_named():
    with pytest.raises(UserError, match="config.json: hidden_size is missing; a 'llama' model needs it"):
        config_from_hf({key: value for key, value in LLAMA31.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Qwen2.5-0.5B", {"bias": True}),
        ("Qwen2.5-0.5B", {"attn_bias": False}),
        ("pico-llama", {"parallel_residual": True}),
        ("pico-llama", {"attn_proj_bias": True}),
        ("pico-llama", {"rotary_percentage": 0.5}),
        ("pythia-14m", {"n_query_groups": 2}),
        ("gpt2", {"position_embedding": "rope"}),
        ("Qwen3-30B-A3B", {"norm_qk_type": "olmo2"}),
    ],
)
def test_config_that_hugging_face_cannot_express_is_rejected(name, change):
    config = ModelConfig(**(get_config(name).with_vocab_size(100).to_dict() | change))
    for export in (family_of(config).to_hf_config, family_of(config).weight_map):
        with pytest.raises(UserError, match=next(iter(change))):
            export(config)


@pytest.mark.parametrize("name", ["pico-llama", "pythia-14m", "gpt2", "Qwen2.5-0.5B"])
def test_n10_tied_head_is_mapped_once_and_never_exported(name):
    for tied in (True, False):
        config = ModelConfig(
            **(get_config(name).with_vocab_size(100).to_dict() | {"tie_embeddings": tied, "n_layer": 1})
        )
        mappings = family_of(config).weight_map(config)
        native, hf = [n for m in mappings for n in m.native], [n for m in mappings for n in m.hf]
        assert len(set(native)) == len(native) and len(set(hf)) == len(hf)
        with torch.device("meta"):
            parameters = {n for n, _ in GPT(config).named_parameters(remove_duplicate=False)}
        assert set(native) == parameters - ({"lm_head.weight"} if tied else set())
        assert family_of(config).to_hf_config(config)["tie_word_embeddings"] is tied


GPT_OSS_20B = {  # openai/gpt-oss-20b
    "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02,
    "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def test_gpt_oss_from_published_file_and_transformers_defaults():
    transformers = pytest.importorskip("transformers")
    assert dataclasses.replace(config_from_hf(GPT_OSS_20B), name="gpt-oss-20b") == get_config("gpt-oss-20b")
    for written in ({"model_type": "gpt_oss"}, transformers.GptOssConfig().to_dict()):
        assert dataclasses.replace(config_from_hf(written), name="gpt-oss-120b") == get_config("gpt-oss-120b")
    balanced = GPT_OSS_20B | {"output_router_logits": True}
    assert config_from_hf(balanced).router_aux_loss_coef == 0.9
    with pytest.raises(UserError, match="swiglu_alpha 1.5: of a 'gpt_oss' model, this version computes only 1.702"):
        config_from_hf(GPT_OSS_20B | {"swiglu_alpha": 1.5})


def test_deepseek_without_a_coefficient_has_no_load_balancing_loss():
    """As transformers writes and computes it; configs by name keep their training's."""
    transformers = pytest.importorskip("transformers")
    for config in (
        transformers.DeepseekV2Config(num_experts_per_tok=6, moe_intermediate_size=1408),
        transformers.DeepseekV3Config(),
    ):
        assert config_from_hf(config.to_dict()).router_aux_loss_coef == 0
    given = transformers.DeepseekV3Config().to_dict() | {"aux_loss_alpha": 0.08}
    assert config_from_hf(given).router_aux_loss_coef == 0.01
    assert get_config("DeepSeek-V3").router_aux_loss_coef == 0.0001 / 8


def test_gpt_oss_that_transformers_cannot_express_is_rejected():
    for field, value, message in (
        ("attention_sinks", False, "--model_config.attention_sinks false: the Hugging Face model type 'gpt_oss'"),
        ("norm_topk_prob", False, "--model_config.norm_topk_prob false: the Hugging Face model type 'gpt_oss'"),
        ("swiglu_limit", None, "--model_config.family gpt_oss: .* swiglu_limit None: must be a number"),
    ):
        config = dataclasses.replace(get_config("gpt-oss-20b"), **{field: value})
        with pytest.raises(UserError, match=f"^{message}"):
            family_of(config).to_hf_config(config)


def test_a_family_with_a_model_class_is_not_built_as_gpt():
    """Its weights and forward pass would be those of another architecture."""
    config = get_config("gemma-4-E2B").with_vocab_size(64)
    with pytest.raises(UserError, match="family gemma4_text: has a model class; use toolkit.models.gpt.build_model"):
        GPT(config)
    assert type(model_on_meta(config)) is not GPT
