from __future__ import annotations

import jsonargparse
import pytest

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig, ModelOverrides

# What LitGPT 0.5.13 writes into model_config.yaml, for its pythia-14m and tiny-llama-1.1b.
LITGPT = {
    "hf_config": {"name": "pythia-14m", "org": "EleutherAI"}, "norm_qk": False, "norm_qk_type": "default",
    "post_attention_norm": False, "post_mlp_norm": False, "shared_attention_norm": False, "attn_bias": False,
    "attention_scores_scalar": None, "sliding_window_size": None, "sliding_window_indices": None,
    "attention_logit_softcapping": None, "rope_condense_ratio": 1, "rope_adjustments": None, "rope_interleave": False,
    "moe_intermediate_size": None, "gelu_approximate": "none", "n_expert": 0, "n_shared_expert": None,
    "n_expert_groups": None, "n_topk_groups": None, "n_topk_scores_per_group": None, "n_expert_per_token": 0,
    "first_k_dense_replace": None, "routed_scaling_factor": 1.0, "norm_topk_prob": False, "scale_embeddings": False,
    "lm_head_bias": False, "final_logit_softcapping": None, "norm_1": True, "norm_2": True, "latent_attention": None,
    "rope_local_base_freq": None, "rope_indices": None, "norm_eps": 1e-05, "rope_base": 10000,
}  # fmt: skip
LITGPT_PYTHIA = LITGPT | {
    "name": "pythia-14m", "block_size": 512, "n_layer": 6, "n_embd": 128, "vocab_size": 50254,
    "padding_multiple": 128, "padded_vocab_size": 50304, "norm_class_name": "LayerNorm", "parallel_residual": True,
    "n_head": 4, "head_size": 32, "n_query_groups": 4, "rotary_percentage": 0.25, "intermediate_size": 512,
    "bias": True, "mlp_class_name": "GptNeoxMLP",
}  # fmt: skip
LITGPT_LLAMA = LITGPT | {
    "name": "tiny-llama-1.1b", "block_size": 2048, "n_layer": 22, "n_embd": 2048, "vocab_size": 32000,
    "padding_multiple": 64, "padded_vocab_size": 32000, "norm_class_name": "RMSNorm", "parallel_residual": False,
    "n_head": 32, "head_size": 64, "n_query_groups": 4, "rotary_percentage": 1.0, "intermediate_size": 5632,
    "bias": False, "mlp_class_name": "LLaMAMLP",
}  # fmt: skip


def test_a_config_survives_the_way_through_its_file():
    config = ModelConfig(name="x", vocab_size=1000, n_query_groups=2, tie_embeddings=True)
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_litgpt_files_of_both_kinds_are_read():
    pythia = ModelConfig.from_dict(LITGPT_PYTHIA)
    assert (pythia.family, pythia.parallel_residual, pythia.rotary_percentage) == ("gpt_neox", True, 0.25)
    assert (pythia.vocab_size, pythia.padded_vocab_size, pythia.tie_embeddings) == (50254, 50304, False)
    llama = ModelConfig.from_dict(LITGPT_LLAMA)
    assert (llama.family, llama.n_query_groups, llama.position_embedding) == ("llama", 4, "rope")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_expert", 8),
        ("n_shared_expert", 1),
        ("first_k_dense_replace", 1),
        ("rope_condense_ratio", 4),
        ("mlp_class_name", "SomeMLP"),
        ("rope_adjustments", {"factors": 8.0}),
        ("something_of_next_year", 1),
    ],
)
def test_a_field_that_would_change_the_mathematics_is_never_dropped(name, value):
    with pytest.raises(UserError, match=name):
        ModelConfig.from_dict(LITGPT_LLAMA | {name: value})


def test_the_usual_attention_scale_may_be_spelled_out():
    ModelConfig.from_dict(LITGPT_LLAMA | {"attention_scores_scalar": 64})


def test_overrides_are_parsed_from_flags_and_derived_fields_follow():
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--model_config", type=ModelOverrides, default=ModelOverrides())
    flags = ["--model_config.n_embd", "64", "--model_config.n_head", "4", "--model_config.n_layer", "3"]
    args = parser.instantiate_classes(parser.parse_args(flags))
    config = ModelConfig(vocab_size=100, n_embd=256, n_head=8, n_query_groups=2).override(args.model_config)
    assert (config.n_layer, config.head_size, config.intermediate_size) == (3, 16, 256)
    parser.exit_on_error = False
    with pytest.raises(jsonargparse.ArgumentError, match="n_layer"):
        parser.parse_args(["--model_config.n_layer", "many"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_layer", 0),
        ("n_query_groups", 3),
        ("norm_class_name", "BatchNorm"),
        ("shared_attention_norm", True),
        ("head_size", 7),
        ("padded_vocab_size", 10),
        ("padding_multiple", 0),
        ("rotary_percentage", 2.0),
        ("rotary_percentage", -0.5),
        ("n_expert", 4),
    ],
)
def test_impossible_values_are_refused_with_the_flag_named(field, value):
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"vocab_size": 100, field: value})


def test_a_padded_vocabulary_that_is_set_survives_the_tokenizer():
    config = ModelConfig(padded_vocab_size=512)
    assert config.with_vocab_size(300).padded_vocab_size == 512
    assert ModelConfig().with_vocab_size(300).padded_vocab_size == 320
    with pytest.raises(UserError, match="padded_vocab_size 512: smaller than vocab_size 600"):
        config.with_vocab_size(600)


@pytest.mark.parametrize(
    ("facts", "family"),
    [
        ({"mlp_class_name": "GemmaMLP", "scale_embeddings": True}, "gemma"),
        ({"mlp_class_name": "GemmaMLP", "scale_embeddings": True, "post_mlp_norm": True}, "gemma2"),
        ({"mlp_class_name": "GemmaMLP", "post_mlp_norm": True, "norm_qk": True}, "gemma3_text"),
        ({"norm_1": False, "norm_2": False, "norm_qk": True}, "olmo2"),
        ({"norm_qk": True}, "qwen3"),
        ({"attn_bias": True}, "qwen2"),
        ({"norm_class_name": "LayerNorm"}, "stablelm"),
        ({"sliding_window_size": 4096}, "mistral"),
        ({"mlp_class_name": "GptNeoxMLP", "bias": True, "lm_head_bias": True}, "phi"),
        ({"mlp_class_name": "GptNeoxMLP"}, "falcon"),
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2}, "mixtral"),
        ({"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2, "norm_qk": True}, "qwen3_moe"),
    ],
)
def test_the_family_of_a_litgpt_file_is_told_by_its_facts_and_not_by_its_name(facts, family):
    assert ModelConfig.from_dict(LITGPT_LLAMA | facts).family == family
    named = ModelConfig.from_dict(LITGPT_LLAMA | facts | {"name": "my-Gemma-OLMo"})
    assert named.family == family and named.norm_offset == facts.get("scale_embeddings", False)
    ours = ModelConfig(name="my-Gemma-data", vocab_size=100)
    assert ModelConfig.from_dict(ours.to_dict()) == ours


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_expert_per_token", 0),
        ("n_expert_per_token", 5),
        ("moe_intermediate_size", 20),
        ("n_embd", 68),
        ("bias", True),
        ("parallel_residual", True),
        ("router_aux_loss_coef", -1.0),
        ("moe_indices", [1]),
    ],
)
def test_impossible_experts_are_refused_with_the_flag_named(field, value):
    facts = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 24}
    facts |= {"n_head": 2}
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"vocab_size": 100, **facts, field: value})
