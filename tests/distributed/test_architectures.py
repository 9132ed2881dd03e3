"""N3 under FSDP for blocks with sliding windows, soft-capping, QK-norm and post-norm."""

import pytest
from helpers.compare_runs import losses, require_close
from helpers.groups import Case, run_group

GEMMA2 = {
    "family": "gemma2", "norm_offset": True, "scale_embeddings": True, "post_attention_norm": True,
    "post_mlp_norm": True, "mlp_class_name": "GemmaMLP", "gelu_approximate": "tanh", "sliding_window_size": 12,
    "sliding_window_indices": [1, 0], "attention_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
}  # fmt: skip
OLMO3 = {
    "family": "olmo3", "norm_1": False, "norm_2": False, "post_attention_norm": True, "post_mlp_norm": True,
    "norm_qk": True, "norm_qk_type": "olmo2", "sliding_window_size": 12, "sliding_window_indices": [1, 0],
    "rope_indices": [1, 0], "rope_local_base_freq": 100.0, "tie_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "family": "deepseek_v3", "n_query_groups": 4, "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_expert_gate": False,
    "router_scores": "sigmoid", "n_expert_groups": 4, "n_topk_groups": 2, "norm_topk_prob": True,
    "latent_attention": {
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
GLM4_MOE = {
    "family": "glm4_moe", "mlp_class_name": "LLaMAMoE", "n_expert": 8, "n_expert_per_token": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "shared_expert_gate": False,
    "router_scores": "sigmoid", "norm_topk_prob": True, "attn_bias": True, "norm_qk": True, "rotary_percentage": 0.5,
}  # fmt: skip
GPT_OSS = {
    "family": "gpt_oss", "bias": True, "attention_sinks": True, "mlp_class_name": "LLaMAMoE", "n_expert": 4,
    "n_expert_per_token": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "swiglu_limit": 7.0,
    "sliding_window_size": 12, "sliding_window_indices": [1, 0],
}  # fmt: skip
GEMMA4 = {  # one layer of each kind, and two that take their keys and values
    "family": "gemma4_text", "scale_embeddings": True, "gelu_approximate": "tanh", "attention_multiplier": 1.0,
    "norm_qk": True, "post_attention_norm": True, "post_mlp_norm": True, "mlp_class_name": "GemmaMLP", "n_layer": 4,
    "sliding_window_size": 12, "sliding_window_indices": [1, 0, 1, 0], "rope_indices": [1, 0, 1, 0],
    "rope_local_base_freq": 100.0, "rope_adjustments": {"partial_rotary_factor": 0.5}, "n_query_groups": 2,
    "family_options": {
        "full_attention": {"head_size": 24, "n_query_groups": 1}, "keys_are_values": True, "n_shared_kv_layers": 2,
        "double_wide_mlp": True, "per_layer_size": 16, "per_layer_vocab_size": 512,
    },
}  # fmt: skip
APERTUS = {"family": "apertus", "norm_qk": True, "mlp_class_name": "XieluMLP"}
MODELS = {"gemma2": GEMMA2, "gemma4": GEMMA4, "olmo3": OLMO3, "deepseek": DEEPSEEK, "glm4_moe": GLM4_MOE,
          "gpt_oss": GPT_OSS, "apertus": APERTUS}  # fmt: skip
SHOWN_BY = {
    "gemma2": "post_mlp_norm", "gemma4": "wte_per_layer", "olmo3": "norm_q", "deepseek": "mlp.correction",
    "glm4_moe": "attn.norm_q", "gpt_oss": "attn.sinks", "apertus": "mlp.alpha_p",
}  # fmt: skip


def flags(options: dict) -> list[str]:
    return [word for name, value in options.items() for word in (f"--model_config.{name}", str(value))]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_n3_two_ranks_match_one(name, tmp_path, shared_flags):
    same = ["--precision", "32-true", *flags(MODELS[name])]
    run_group(tmp_path, 1, [Case("one", same)], shared_flags)
    cases = [Case("two", [*same, "--strategy", "fsdp"])]
    if name == "gemma4":  # its blocks pass keys and values on
        cases += [Case("ddp", [*same, "--strategy", "ddp"])]
        cases += [
            Case(mode, [*cases[0].flags, "--train.activation_checkpointing", mode]) for mode in ("selective", "full")
        ]
    run_group(tmp_path, 2, cases, shared_flags)
    one = losses(tmp_path / "one")
    assert len(one) == 20 and one[-1] < one[0] - 0.1
    for case in cases:
        assert any(SHOWN_BY[name] in key for key in require_close(tmp_path / case.name, tmp_path / "one"))
    assert all(losses(tmp_path / case.name) == losses(tmp_path / "two") for case in cases[2:])
