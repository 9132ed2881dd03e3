"""Configurations of tiny models: every family as transformers writes it, and as toolkit does."""

import pytest

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
QWEN2_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GROUPED = {**LLAMA, "num_key_value_heads": 2}
FOUR = {**GROUPED, "num_hidden_layers": 4}
GEMMA = {**GROUPED, "head_dim": 24}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4 = {
    **GEMMA,
    "num_hidden_layers": 5,
    "sliding_window": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 330,
    "final_logit_softcapping": 20.0,
    "pad_token_id": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
OLMO3_ROPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
STABLELM = {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
PHI = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}
NO_PAD = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
PHI3 = {**GROUPED, **NO_PAD}
FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
          "max_position_embeddings": 64}  # fmt: skip


def longrope(original: int) -> dict:
    """Return Phi 3's longrope for 8 pairs of dimensions and this original context."""
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0 + i / 20 for i in range(8)],
            "long_factor": [1.0 + i for i in range(8)], "original_max_position_embeddings": original,
        },
    }  # fmt: skip


NEOX = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}}
MIXTRAL = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT_OSS = {
    **GROUPED, "head_dim": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
QWEN_MOE = {**GROUPED, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}
LINEAR = {
    **GROUPED, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LINEAR_MOE = {
    **LINEAR, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3,
    "shared_expert_intermediate_size": 40,
}  # fmt: skip
MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 500.0}
DEEPSEEK = {
    **LLAMA, **NO_PAD, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
}  # fmt: skip
GLM4_MOE = {
    **GROUPED, "head_dim": 16, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip
GLM4_MOE_LITE = {
    **DEEPSEEK, "bos_token_id": 0, "q_lora_rank": 24, "v_head_dim": 16, "num_experts_per_tok": 3,
}  # fmt: skip
GLM4 = {**GROUPED, "pad_token_id": None, "eos_token_id": 1}
OLMOE = {**GROUPED, **NO_PAD, "num_experts": 8, "num_experts_per_tok": 3}
ERNIE_MOE = {
    **GROUPED, **NO_PAD, "moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2,
}  # fmt: skip
GRANITE = {
    **GROUPED, "embedding_multiplier": 12.0, "attention_multiplier": 0.15, "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}

HF_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-grouped-tied": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True),
    "llama-one-group-wide-heads": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=1, head_dim=24),
    "llama-biases": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama-attention-biases": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True),
    "llama3-rope": lambda: transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": lambda: transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    ),
    "llama-yarn": lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=YARN),
    "smollm3": lambda: transformers.SmolLM3Config(**FOUR, **NO_PAD),
    "smollm3-windows": lambda: transformers.SmolLM3Config(
        **FOUR, **NO_PAD, use_sliding_window=True, sliding_window=16, tie_word_embeddings=False
    ),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=None, head_dim=24),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=16),
    "ministral": lambda: transformers.MinistralConfig(**GROUPED, sliding_window=16, head_dim=24),
    "ministral-full-below": lambda: transformers.MinistralConfig(
        **FOUR,
        head_dim=16,
        sliding_window=16,
        layer_types=["full_attention", *["sliding_attention"] * 3],
        tie_word_embeddings=True,
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **GROUPED, head_dim=24, rope_parameters=YARN | {"llama_4_scaling_beta": 0.3}
    ),
    "ministral3-window-tied": lambda: transformers.Ministral3Config(
        **{**GROUPED, "num_key_value_heads": 4},
        head_dim=16,
        sliding_window=16,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **GROUPED, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=32),
    "qwen3-tied": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**MIXTRAL),
    "mixtral-window-wide-heads-one-expert": lambda: transformers.MixtralConfig(
        **{**MIXTRAL, "num_experts_per_tok": 1}, head_dim=24, sliding_window=16, tie_word_embeddings=True
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(**QWEN_MOE, shared_expert_intermediate_size=40),
    "qwen2-moe-normed-windows-without-biases": lambda: transformers.Qwen2MoeConfig(
        **{**QWEN_MOE, "num_hidden_layers": 4},
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=3,
        qkv_bias=False,
    ),
    "qwen2-moe-dense-between": lambda: transformers.Qwen2MoeConfig(
        **{**QWEN_MOE, "num_hidden_layers": 4}, shared_expert_intermediate_size=40, decoder_sparse_step=2
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**QWEN_MOE, head_dim=16, norm_topk_prob=True),
    "qwen3-moe-not-normed-wide-heads-dense-first": lambda: transformers.Qwen3MoeConfig(
        **QWEN_MOE,
        head_dim=32,
        norm_topk_prob=False,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=16,
    ),
    "qwen3-next": lambda: transformers.Qwen3NextConfig(**LINEAR_MOE),
    "qwen3-next-biases-dense-first-not-normed-tied": lambda: transformers.Qwen3NextConfig(
        **LINEAR_MOE | {"layer_types": None, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
        full_attention_interval=2,
        attention_bias=True,
        mlp_only_layers=[0],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"partial_rotary_factor": 0.5},
    ),
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(**LINEAR, rope_parameters=MROPE),
    "qwen3.5-attention-first-tied": lambda: transformers.Qwen3_5TextConfig(
        **LINEAR | {"layer_types": LINEAR["layer_types"][::-1], "linear_num_key_heads": 4}, tie_word_embeddings=True
    ),
    "qwen3.5-moe": lambda: transformers.Qwen3_5MoeTextConfig(**LINEAR_MOE, rope_parameters=MROPE),
    "gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS),
    "gpt-oss-one-group-low-limit-tied": lambda: transformers.GptOssConfig(
        **{**GPT_OSS, "num_key_value_heads": 1, "head_dim": 32}, swiglu_limit=0.5, tie_word_embeddings=True
    ),
    "gpt-oss-without-windows-or-scaling": lambda: transformers.GptOssConfig(
        **GPT_OSS
        | {
            "num_key_value_heads": 4,
            "head_dim": 16,
            "num_experts_per_tok": 1,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        }
    ),
    "gemma": lambda: transformers.GemmaConfig(**GEMMA),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, sliding_window=16, query_pre_attn_scalar=40),
    "gemma2-without-caps": lambda: transformers.Gemma2Config(
        **GEMMA, attn_logit_softcapping=None, final_logit_softcapping=None, tie_word_embeddings=False
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 7}, sliding_window=16, rope_parameters=GEMMA3_ROPE, query_pre_attn_scalar=24
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4-moe": lambda: transformers.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 0},
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
    ),
    "phi": lambda: transformers.PhiConfig(**PHI),
    "phi-grouped": lambda: transformers.PhiConfig(**PHI, num_key_value_heads=2),
    "phi-norms": lambda: transformers.PhiConfig(**PHI, num_key_value_heads=2, qk_layernorm=True),
    "phi3": lambda: transformers.Phi3Config(**PHI3),
    "phi3-window": lambda: transformers.Phi3Config(**PHI3, sliding_window=16, tie_word_embeddings=True),
    "phi3-long": lambda: transformers.Phi3Config(**PHI3, **longrope(16)),
    "phi3-short": lambda: transformers.Phi3Config(**PHI3, **longrope(60)),
    "falcon-one-group": lambda: transformers.FalconConfig(**FALCON),
    "falcon-groups": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-groups-one-norm": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False
    ),
    "falcon-no-groups": lambda: transformers.FalconConfig(**FALCON, multi_query=False, ffn_hidden_size=96),
    "olmo": lambda: transformers.OlmoConfig(**LLAMA),
    "olmo-clipped": lambda: transformers.OlmoConfig(**GROUPED, clip_qkv=0.5, tie_word_embeddings=True),
    "olmo2": lambda: transformers.Olmo2Config(**GROUPED),
    "olmo3": lambda: transformers.Olmo3Config(**FOUR, sliding_window=16, rope_parameters=OLMO3_ROPE),
    "stablelm": lambda: transformers.StableLmConfig(**STABLELM),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **STABLELM, use_qkv_bias=True, use_parallel_residual=True, tie_word_embeddings=True
    ),
    "stablelm-12b": lambda: transformers.StableLmConfig(**STABLELM, use_parallel_residual=True, qk_layernorm=True),
    "granite": lambda: transformers.GraniteConfig(**GRANITE),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**GRANITE, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe-one-expert-biases-tied": lambda: transformers.GraniteMoeConfig(
        **LLAMA, num_local_experts=6, num_experts_per_tok=1, attention_bias=True, tie_word_embeddings=True
    ),
    "starcoder2": lambda: transformers.Starcoder2Config(**GROUPED, **NO_PAD, sliding_window=16),
    "starcoder2-without-biases": lambda: transformers.Starcoder2Config(
        **GROUPED, **NO_PAD, use_bias=False, tie_word_embeddings=False
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, v_head_dim=8, num_experts_per_tok=3, n_shared_experts=2
    ),
    "deepseek-v2-groups-yarn": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=24,
        v_head_dim=16,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=4.0,
        first_k_dense_replace=1,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=24,
        v_head_dim=16,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-one-group-wide-values-not-normed": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=None,
        v_head_dim=32,
        num_experts_per_tok=2,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        rms_norm_eps=1e-3,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "glm4": lambda: transformers.Glm4Config(**GLM4, head_dim=24),
    "glm4-yarn-tied-without-biases": lambda: transformers.Glm4Config(
        **GLM4,
        head_dim=16,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"partial_rotary_factor": 0.25},
    ),
    "glm": lambda: transformers.GlmConfig(**GLM4, head_dim=24, tie_word_embeddings=True),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(
        **GLM4_MOE, attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5
    ),
    "glm4-moe-groups-without-biases-tied": lambda: transformers.Glm4MoeConfig(
        **GLM4_MOE | {"num_key_value_heads": 4, "num_hidden_layers": 3, "head_dim": 24},
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=2,
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"partial_rotary_factor": 0.25},
    ),
    "glm4-moe-lite": lambda: transformers.Glm4MoeLiteConfig(**GLM4_MOE_LITE),
    "glm4-moe-lite-groups-dense-last-tied": lambda: transformers.Glm4MoeLiteConfig(
        **GLM4_MOE_LITE | {"q_lora_rank": None},
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        mlp_layer_types=["sparse", "dense"],
        norm_topk_prob=False,
        tie_word_embeddings=True,
        rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    ),
    "seed-oss": lambda: transformers.SeedOssConfig(**GROUPED, **NO_PAD, head_dim=24),
    "seed-oss-output-bias": lambda: transformers.SeedOssConfig(
        **LLAMA, **NO_PAD, num_key_value_heads=1, attention_bias=False, attention_out_bias=True, head_dim=16
    ),
    "seed-oss-biases": lambda: transformers.SeedOssConfig(
        **GROUPED, **NO_PAD, attention_out_bias=True, mlp_bias=True, head_dim=16, tie_word_embeddings=True
    ),
    "cohere2": lambda: transformers.Cohere2Config(**FOUR, **NO_PAD, sliding_window=16),
    "cohere2-biases-untied": lambda: transformers.Cohere2Config(
        **{**FOUR, "num_key_value_heads": 4},
        **NO_PAD,
        sliding_window=16,
        attention_bias=True,
        logit_scale=0.3,
        tie_word_embeddings=False,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "cohere2-without-windows": lambda: transformers.Cohere2Config(
        **GROUPED, **NO_PAD, layer_types=["full_attention"] * 2
    ),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**GROUPED, head_dim=24),
    "hunyuan-ntk-biases-tied": lambda: transformers.HunYuanDenseV1Config(
        **LLAMA,
        head_dim=16,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0},
    ),
    "exaone4": lambda: transformers.Exaone4Config(**FOUR, sliding_window=16),
    "exaone4-without-windows-tied": lambda: transformers.Exaone4Config(
        **{**GROUPED, "num_key_value_heads": 4},
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3_ROPE,
    ),
    "ernie4.5": lambda: transformers.Ernie4_5Config(**GROUPED, **NO_PAD, head_dim=24),
    "ernie4.5-biases-untied": lambda: transformers.Ernie4_5Config(
        **{**GROUPED, "num_key_value_heads": 4}, **NO_PAD, head_dim=16, use_bias=True, tie_word_embeddings=False
    ),
    "ernie4.5-moe": lambda: transformers.Ernie4_5_MoeConfig(**ERNIE_MOE),
    "ernie4.5-moe-dense-ends-untied": lambda: transformers.Ernie4_5_MoeConfig(
        **ERNIE_MOE | {"num_hidden_layers": 3, "num_key_value_heads": 4, "moe_num_shared_experts": 0, "moe_k": 1},
        moe_layer_end_index=1,
        tie_word_embeddings=False,
        head_dim=24,
    ),
    "apertus": lambda: transformers.ApertusConfig(**GROUPED, **NO_PAD, rope_parameters=LLAMA3_ROPE),
    "apertus-biases-wide-heads-tied": lambda: transformers.ApertusConfig(
        **LLAMA,
        **NO_PAD,
        head_dim=24,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**OLMOE),
    "olmoe-normed": lambda: transformers.OlmoeConfig(
        **{**OLMOE, "num_key_value_heads": 4, "num_experts_per_tok": 1}, norm_topk_prob=True, tie_word_embeddings=True
    ),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA, num_key_value_heads=2),
    "qwen2-tied": lambda: transformers.Qwen2Config(
        **LLAMA, num_key_value_heads=1, tie_word_embeddings=True, rope_parameters=QWEN2_ROPE
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**NEOX),
    "neox-serial-tied": lambda: transformers.GPTNeoXConfig(
        **NEOX, use_parallel_residual=False, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2-untied": lambda: transformers.GPT2Config(**GPT2, n_inner=96, tie_word_embeddings=False),
}

LATENT = {
    "latent_attention": {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 20,
    },
    "mlp_class_name": "LLaMAMoE", "moe_intermediate_size": 24, "shared_expert_gate": False,
}  # fmt: skip
GATED_DELTA_NET = {
    "vocab_size": 90, "n_query_groups": 2, "head_size": 32, "norm_offset": True, "norm_qk": True,
    "attention_gate": True, "rotary_percentage": 0.25, "linear_attention_indices": [1, 0],
    "linear_attention": {"n_key_heads": 2, "n_value_heads": 6, "key_size": 8, "value_size": 16, "conv_size": 4},
}  # fmt: skip
GATED_MOE = {
    **GATED_DELTA_NET, "mlp_class_name": "LLaMAMoE", "n_expert": 6, "n_expert_per_token": 2, "norm_topk_prob": True,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
_GEMMA4_OPTIONS = {
    "full_attention": {"head_size": 24, "n_query_groups": 4}, "keys_are_values": False, "n_shared_kv_layers": 0,
    "double_wide_mlp": False, "per_layer_size": 8, "per_layer_vocab_size": 192,
}  # fmt: skip
NATIVE_CONFIGS = {
    "qwen3-next": {"family": "qwen3_next", **GATED_MOE, "moe_indices": [1, 0]},
    "qwen3.5": {"family": "qwen3_5_text", **GATED_DELTA_NET, "tie_embeddings": True},
    "qwen3.5-moe": {"family": "qwen3_5_moe_text", **GATED_MOE},
    "llama-tied": {"vocab_size": 90, "n_query_groups": 2, "tie_embeddings": True},
    "llama-untied-wide-heads": {"vocab_size": 90, "head_size": 32, "norm_eps": 1e-6, "rope_base": 500.0},
    "llama3-rope": {
        "vocab_size": 96, "rope_base": 500.0,
        "rope_adjustments": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_seq_len": 32,
        },
    },
    "llama-attention-biases": {"vocab_size": 96, "attn_bias": True, "attn_proj_bias": True},
    "llama-biases": {"vocab_size": 96, "bias": True},
    "qwen2": {"family": "qwen2", "vocab_size": 90, "n_query_groups": 2, "attn_bias": True, "tie_embeddings": True},
    "qwen2-wide-heads": {"family": "qwen2", "vocab_size": 96, "head_size": 32, "attn_bias": True, "norm_eps": 1e-6},
    "gemma2": {
        "family": "gemma2", "vocab_size": 90, "norm_offset": True, "scale_embeddings": True, "post_mlp_norm": True,
        "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "post_attention_norm": True,
        "sliding_window_size": 16, "sliding_window_indices": [0, 1], "attention_logit_softcapping": 20.0,
        "tie_embeddings": True,
    },
    "gemma3": {
        "family": "gemma3_text", "vocab_size": 90, "norm_offset": True, "scale_embeddings": True, "post_mlp_norm": True,
        "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "post_attention_norm": True,
        "sliding_window_size": 16, "sliding_window_indices": [0, 1], "rope_indices": [0, 1],
        "rope_local_base_freq": 50.0, "norm_qk": True,
        "rope_adjustments": {"factor": 4.0}, "tie_embeddings": True, "head_size": 32,
    },
    "gemma4": {
        **(_GEMMA4 := {
            "family": "gemma4_text", "vocab_size": 90, "scale_embeddings": True, "gelu_approximate": "tanh",
            "attention_multiplier": 1.0, "norm_qk": True, "post_attention_norm": True, "post_mlp_norm": True,
            "rope_local_base_freq": 50.0, "rope_adjustments": {"partial_rotary_factor": 0.5, "factor": 2.0},
            "mlp_class_name": "GemmaMLP",
        }),
        "sliding_window_size": 16, "sliding_window_indices": [1, 0], "rope_indices": [1, 0], "tie_embeddings": True,
        "family_options": _GEMMA4_OPTIONS | {"keys_are_values": True},
    },
    "gemma4-shared": {
        **_GEMMA4, "rope_indices": [0, 0],
        "family_options": _GEMMA4_OPTIONS | {"n_shared_kv_layers": 1, "double_wide_mlp": True},
    },
    "gemma4-moe": {
        **_GEMMA4, "rope_indices": [0, 0], "mlp_class_name": "LLaMAMoE", "n_expert": 6, "n_expert_per_token": 2,
        "moe_intermediate_size": 32, "norm_topk_prob": True, "shared_expert_intermediate_size": 256,
        "shared_expert_gate": False, "family_options": _GEMMA4_OPTIONS | {"per_layer_size": 0},
    },
    "phi3-long": {
        "family": "phi3", "vocab_size": 96, "rotary_percentage": 0.75,
        "rope_adjustments": {
            "short_factor": [1.0] * 6, "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0], "original_max_seq_len": 32,
            "attention_factor": 1.0954451150103321,  # sqrt(1 + ln 2 / ln 32), for 64 tokens instead of 32
        },
    },
    "olmo3": {
        "family": "olmo3", "vocab_size": 90, "norm_1": False, "norm_2": False, "post_attention_norm": True,
        "post_mlp_norm": True, "norm_qk": True, "norm_qk_type": "olmo2", "sliding_window_size": 16,
        "sliding_window_indices": [1, 0], "rope_indices": [1, 0], "rope_local_base_freq": 10000.0,
    },
    "stablelm": {
        "family": "stablelm", "vocab_size": 90, "n_query_groups": 2, "norm_class_name": "LayerNorm", "norm_qk": True,
        "norm_qk_type": "per_head", "rotary_percentage": 0.5, "tie_embeddings": True,
    },
    "falcon": {
        "family": "falcon", "vocab_size": 90, "n_query_groups": 2, "norm_class_name": "LayerNorm",
        "mlp_class_name": "GptNeoxMLP", "parallel_residual": True, "tie_embeddings": True,
    },
    "starcoder2": {
        "family": "starcoder2", "vocab_size": 90, "n_query_groups": 2, "norm_class_name": "LayerNorm", "bias": True,
        "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh", "sliding_window_size": 16,
    },
    "mixtral": {
        "family": "mixtral", "vocab_size": 90, "n_query_groups": 2, "mlp_class_name": "LLaMAMoE", "n_expert": 4,
        "n_expert_per_token": 2, "norm_topk_prob": True, "intermediate_size": 48, "tie_embeddings": True,
    },
    "qwen2-moe": {
        "family": "qwen2_moe", "vocab_size": 90, "attn_bias": True, "mlp_class_name": "LLaMAMoE", "n_expert": 6,
        "n_expert_per_token": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "head_size": 32,
    },
    "qwen3-moe": {
        "family": "qwen3_moe", "vocab_size": 90, "norm_qk": True, "mlp_class_name": "LLaMAMoE", "n_expert": 8,
        "n_expert_per_token": 2, "moe_intermediate_size": 24, "norm_topk_prob": True, "moe_indices": [1, 0],
        "head_size": 32, "n_query_groups": 2,
    },
    "deepseek-v2": {
        "family": "deepseek_v2", "vocab_size": 90, **LATENT, "n_expert": 6, "n_expert_per_token": 3,
        "shared_expert_intermediate_size": 48, "n_expert_groups": 3, "n_topk_groups": 2, "tie_embeddings": True,
    },
    "deepseek-v3": {
        "family": "deepseek_v3", "vocab_size": 90, **LATENT, "n_expert": 8, "n_expert_per_token": 3,
        "shared_expert_intermediate_size": 24, "n_expert_groups": 2, "n_topk_groups": 1, "router_scores": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_indices": [0, 1],
        "rope_adjustments": {
            "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4-moe": {
        "family": "glm4_moe", "vocab_size": 90, "n_query_groups": 2, "head_size": 20, "rotary_percentage": 0.6,
        "attn_bias": True, "norm_qk": True, "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48, "shared_expert_gate": False,
        "router_scores": "sigmoid", "n_expert_groups": 2, "n_topk_groups": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "moe_indices": [0, 1],
    },
    "glm4-moe-lite": {
        "family": "glm4_moe_lite", "vocab_size": 90, **LATENT, "n_expert": 8, "n_expert_per_token": 3,
        "shared_expert_intermediate_size": 24, "router_scores": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "moe_indices": [1, 0],
    },
    "glm4": {
        "family": "glm4", "vocab_size": 90, "n_query_groups": 2, "head_size": 20, "rotary_percentage": 0.6,
        "attn_bias": True, "post_attention_norm": True, "post_mlp_norm": True, "tie_embeddings": True,
    },
    "seed-oss": {"family": "seed_oss", "vocab_size": 90, "attn_bias": True, "attn_proj_bias": True, "head_size": 32},
    "cohere2": {
        "family": "cohere2", "vocab_size": 90, "n_query_groups": 2, "norm_class_name": "LayerNorm", "norm_bias": False,
        "parallel_residual": True, "shared_attention_norm": True, "sliding_window_size": 16, "logits_scaling": 3.0,
        "sliding_window_indices": [1, 0], "rope_indices": [0, -1], "tie_embeddings": True,
    },
    "ministral": {
        "family": "ministral", "vocab_size": 90, "n_query_groups": 2, "head_size": 32, "sliding_window_size": 16,
        "sliding_window_indices": [1, 0],
    },
    "hunyuan": {
        "family": "hunyuan_v1_dense", "vocab_size": 90, "n_query_groups": 2, "head_size": 32, "norm_qk": True,
        "norm_qk_after_rope": True, "tie_embeddings": True,
    },
    "exaone4": {
        "family": "exaone4", "vocab_size": 90, "n_query_groups": 2, "norm_1": False, "norm_2": False, "norm_qk": True,
        "post_attention_norm": True, "post_mlp_norm": True, "sliding_window_size": 16, "sliding_window_indices": [1, 0],
        "rope_indices": [0, -1], "head_size": 32,
    },
    "ernie4.5": {"family": "ernie4_5", "vocab_size": 90, "n_query_groups": 1, "head_size": 32, "tie_embeddings": True},
    "ernie4.5-moe": {
        "family": "ernie4_5_moe", "vocab_size": 90, "n_query_groups": 2, "mlp_class_name": "LLaMAMoE", "n_expert": 6,
        "n_expert_per_token": 2, "moe_intermediate_size": 24, "router_scores": "biased_softmax", "head_size": 32,
        "norm_topk_prob": True, "shared_expert_gate": False, "shared_expert_intermediate_size": 24,
    },
    "apertus": {
        "family": "apertus", "vocab_size": 90, "n_query_groups": 2, "norm_qk": True, "mlp_class_name": "XieluMLP",
    },
    "ministral3": {
        "family": "ministral3", "vocab_size": 90, "n_query_groups": 2, "head_size": 32, "query_scaling_beta": 0.2,
        "rope_adjustments": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16},
    },
    "olmoe": {
        "family": "olmoe", "vocab_size": 90, "norm_qk": True, "norm_qk_type": "olmo2", "mlp_class_name": "LLaMAMoE",
        "n_expert": 6, "n_expert_per_token": 2, "moe_intermediate_size": 24,
    },
    "gpt-oss": {
        "family": "gpt_oss", "vocab_size": 90, "n_query_groups": 2, "head_size": 32, "bias": True,
        "attention_sinks": True, "mlp_class_name": "LLaMAMoE", "n_expert": 6, "n_expert_per_token": 3,
        "norm_topk_prob": True, "intermediate_size": 48, "swiglu_limit": 1.5, "sliding_window_size": 16,
        "sliding_window_indices": [0, 1], "rope_base": 500.0,
        "rope_adjustments": {
            "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_seq_len": 16, "truncate": False,
        },
    },
    "gpt-oss-without-scaling": {
        "family": "gpt_oss", "vocab_size": 96, "bias": True, "attention_sinks": True, "mlp_class_name": "LLaMAMoE",
        "n_expert": 4, "n_expert_per_token": 2, "norm_topk_prob": True, "swiglu_limit": 7.0,
        "moe_intermediate_size": 24, "tie_embeddings": True, "rope_base": 500.0,
    },
    "granite": {"family": "granite", "vocab_size": 90, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "granitemoe": {
        "family": "granitemoe", "vocab_size": 90, "n_query_groups": 2, "mlp_class_name": "LLaMAMoE", "n_expert": 6,
        "n_expert_per_token": 3, "norm_topk_prob": True, "moe_intermediate_size": 24, "residual_multiplier": 0.5,
        "embedding_multiplier": 3.0, "logits_scaling": 2.0,
    },
    "neox": {
        "family": "gpt_neox", "vocab_size": 90, "rotary_percentage": 0.5, "rope_base": 100.0, "bias": True,
        "parallel_residual": True, "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP",
        "gelu_approximate": "tanh",
    },
    "gpt2": {
        "family": "gpt2", "vocab_size": 90, "position_embedding": "learned", "bias": True, "tie_embeddings": True,
        "norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh",
    },
}  # fmt: skip
