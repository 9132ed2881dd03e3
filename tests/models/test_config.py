import jsonargparse
import pytest

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig, ModelOverrides


def test_config_round_trip_through_file():
    config = ModelConfig(name="x", vocab_size=1000, n_query_groups=2, tie_embeddings=True)
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_expert", 8),
        ("mlp_class_name", "SomeMLP"),
        ("rope_adjustments", {"factors": 8.0}),
        ("something_of_next_year", 1),
    ],
)
def test_unknown_field_with_a_value_is_rejected(name, value):
    with pytest.raises(UserError, match=name):
        ModelConfig.from_dict(ModelConfig(vocab_size=100).to_dict() | {name: value})


def test_overrides_from_flags_update_derived_fields():
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
        ("norm_qk_type", "per_head"),
        ("head_size", 7),
        ("padded_vocab_size", 10),
        ("padding_multiple", 0),
        ("rotary_percentage", 2.0),
        ("rotary_percentage", -0.5),
        ("n_expert", 4),
        ("swiglu_limit", 7.0),
        ("swiglu_limit", -1.0),
    ],
)
def test_invalid_values_name_the_flag(field, value):
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"vocab_size": 100, field: value})


def test_explicit_padded_vocab_size_is_kept():
    config = ModelConfig(padded_vocab_size=512)
    assert config.with_vocab_size(300).padded_vocab_size == 512
    assert ModelConfig().with_vocab_size(300).padded_vocab_size == 320
    with pytest.raises(UserError, match="padded_vocab_size 512: smaller than vocab_size 600"):
        config.with_vocab_size(600)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_expert_per_token", 0),
        ("n_expert_per_token", 5),
        ("moe_intermediate_size", 20),
        ("n_embd", 68),
        ("parallel_residual", True),
        ("n_expert_groups", 3),
        ("router_scores", "tanh"),
        ("router_aux_loss_coef", -1.0),
        ("moe_indices", [1]),
    ],
)
def test_invalid_experts_name_the_flag(field, value):
    fields = {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 24}
    fields |= {"n_head": 2}
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"vocab_size": 100, **fields, field: value})


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def test_latent_attention_sets_head_size():
    config = ModelConfig(vocab_size=100, n_embd=30, n_head=4, latent_attention=LATENT)
    assert (config.head_size, config.rope_n_elem, config.n_query_groups) == (12, 4, 4)
    without = {name: n for name, n in LATENT.items() if name != "q_lora_rank"}
    assert ModelConfig(latent_attention=without).latent_attention == LATENT | {"q_lora_rank": None}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("latent_attention", {"latent_attention": LATENT | {"v_head_dim": 0}}),
        ("latent_attention", {"latent_attention": LATENT | {"head_dim": 8}}),
        ("norm_qk", {"norm_qk": True}),
        ("n_query_groups", {"n_query_groups": 2}),
        ("head_size", {"head_size": 40}),
        ("rotary_percentage", {"rotary_percentage": 0.5}),
    ],
)
def test_invalid_latent_attention_names_the_flag(field, fields):
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"latent_attention": LATENT} | fields)


def test_override_of_latent_attention_updates_head_size():
    named = ModelConfig(vocab_size=100, n_embd=30, n_head=4, latent_attention=LATENT)
    assert named.override(ModelOverrides(latent_attention=LATENT | {"qk_nope_head_dim": 10})).head_size == 14
    assert named.override(ModelOverrides(n_embd=64)).head_size == 12
    with pytest.raises(UserError, match="head_size 40: must be 12 with latent_attention"):
        named.override(ModelOverrides(head_size=40))


LINEAR = {"n_key_heads": 2, "n_value_heads": 4, "key_size": 8, "value_size": 8, "conv_size": 4}


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("linear_attention", {"linear_attention": LINEAR | {"key_size": 0}}),
        ("linear_attention", {"linear_attention": LINEAR | {"n_value_heads": 3}}),
        ("linear_attention", {"linear_attention": LINEAR | {"conv_size": 1}}),
        ("linear_attention", {"linear_attention": {"n_key_heads": 2}}),
        ("linear_attention_indices", {"linear_attention": LINEAR, "linear_attention_indices": [1]}),
        ("linear_attention_indices", {"linear_attention": None, "linear_attention_indices": [1, 0]}),
        ("attention_gate", {"latent_attention": LATENT, "attention_gate": True}),
    ],
)
def test_invalid_linear_attention_names_the_flag(field, fields):
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**{"linear_attention": LINEAR} | fields)


def test_layers_with_linear_attention():
    config = ModelConfig(n_layer=3, linear_attention=LINEAR, linear_attention_indices=[1, 0, 1, 1])
    assert [config.has_linear_attention(i) for i in range(3)] == [True, False, True]
    assert ModelConfig(linear_attention=LINEAR).has_linear_attention(1)
    assert not ModelConfig().has_linear_attention(0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_expert_per_token", 2),
        ("moe_intermediate_size", 64),
        ("norm_topk_prob", True),
        ("routed_scaling_factor", 3.0),
        ("router_scores", "sigmoid"),
        ("n_expert_groups", 2),
        ("n_topk_groups", 2),
        ("shared_expert_intermediate_size", 64),
        ("shared_expert_gate", False),
        ("moe_indices", [0, 1]),
    ],
)
def test_moe_fields_without_experts_are_rejected(field, value):
    with pytest.raises(UserError, match=f"model_config.{field} .*: needs --model_config.mlp_class_name LLaMAMoE"):
        ModelConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("n_topk_groups", {"n_topk_groups": 3}),
        ("n_expert_groups", {"n_expert_groups": 8, "n_topk_groups": 4, "router_scores": "sigmoid"}),
        ("n_topk_groups", {"n_expert_groups": 4}),
        ("n_topk_groups", {"n_expert_groups": 4, "n_topk_groups": 5}),
        ("n_topk_groups", {"n_expert_groups": 4, "n_topk_groups": 1}),
    ],
)
def test_invalid_expert_groups_name_the_flag(field, fields):
    experts = {"mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 3, "moe_intermediate_size": 24}
    with pytest.raises(UserError, match=f"model_config.{field}"):
        ModelConfig(**experts | fields)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("n_layer", 2.0, "an integer"),
        ("n_layer", True, "an integer"),
        ("n_embd", "64", "an integer"),
        ("block_size", None, "an integer"),
        ("norm_eps", "1e-5", "a number"),
        ("norm_eps", None, "a number"),
        ("rope_base", float("inf"), "a number"),
        ("rope_base", 0, "greater than zero"),
        ("norm_eps", -1e-5, "not be negative"),
        ("bias", "false", "true or false"),
        ("tie_embeddings", 1, "true or false"),
        ("sliding_window_size", 0, "greater than zero"),
        ("sliding_window_size", -1, "greater than zero"),
        ("attention_logit_softcapping", 0.0, "greater than zero"),
        ("logits_scaling", 0.0, "greater than zero"),
        ("moe_indices", 1, "a list of integers"),
        ("moe_indices", [1.0, 1.0], "a list of integers"),
        ("family", None, "a string"),
        ("rope_adjustments", [1], "a mapping"),
        ("rope_adjustments", {"factor": "4"}, "factor '4': must be a number greater than zero"),
        ("rope_adjustments", {"factor": 0}, "factor 0: must be a number greater than zero"),
        ("latent_attention", {"kv_lora_rank": 8}, "must have q_lora_rank, kv_lora_rank"),
    ],
)
def test_values_of_wrong_type_name_the_flag(field, value, expected):
    with pytest.raises(UserError, match=f"^--model_config.{field}.*{expected}"):
        ModelConfig(**{"vocab_size": 100, field: value})


def test_yarn_needs_rope_base_above_one():
    yarn = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16}
    with pytest.raises(UserError, match="rope_base 1.0: must be greater than 1 with YaRN"):
        ModelConfig(rope_base=1.0, rope_adjustments=yarn)


def test_integers_are_valid_floats():
    assert ModelConfig(rope_base=10000, rope_adjustments={"factor": 4}).rope_kind == "linear"


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
def test_longrope_needs_one_factor_per_pair(name):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_seq_len": 16, "attention_factor": 1.1}
    ModelConfig(rope_adjustments=factors)  # head_size 16
    with pytest.raises(UserError, match=f"rope_adjustments: {name} has 6 factors; heads with 16 rotated .* need 8"):
        ModelConfig(rope_adjustments=factors | {name: [1.0] * 6})


def test_vocabulary_must_be_known():
    config = ModelConfig(name="it")
    assert config.with_vocab_size(100).vocab_size == 100
    assert config.with_vocab_size(100).with_vocab_size(None).vocab_size == 100
    with pytest.raises(UserError, match="^--tokenizer_dir: it takes its vocabulary .*, or --model_config.vocab_size$"):
        config.with_vocab_size(None)
