"""OLMoE (Muennighoff et al. 2024): Llama with experts in all layers and QK-norm over all heads of a token.

Source of the named configuration: the paper (arXiv 2409.02060), and transformers' ``OlmoeConfig`` for the coefficient.
"""

from toolkit.models.config import Fields, ModelConfig
from toolkit.models.families import hf_config, hf_rope, tables

_FIXED: Fields = {"mlp_class_name": "LLaMAMoE", "norm_qk": True, "norm_qk_type": "olmo2"}

CONFIGS = [
    ModelConfig(
        name="OLMoE-1B-7B-0924", family="olmoe", block_size=4096, vocab_size=50304, n_layer=16, n_embd=2048, n_head=16,
        intermediate_size=1024, n_expert=64, n_expert_per_token=8, router_aux_loss_coef=0.01, **_FIXED,
    ),
]  # fmt: skip

ALIASES = {f"OLMoE-1B-7B-0924-{kind}": "OLMoE-1B-7B-0924" for kind in ("SFT", "Instruct")}


def from_hf_config(config_json: Fields) -> ModelConfig:
    # transformers clips after the QK-norm, this version before it
    hf_config.require_silu(config_json, attention_bias=(False,), clip_qkv=(None,))
    alias = hf_config.read_aliases(config_json, {"num_local_experts": "num_experts"})
    config_json = {"rms_norm_eps": 1e-5, "num_experts": 64, **alias, **config_json}
    return ModelConfig(
        **hf_config.read_decoder(config_json, vocab_size=50304, block_size=4096),
        **hf_rope.read_rope(config_json),
        n_expert=config_json["num_experts"],
        n_expert_per_token=config_json.get("num_experts_per_tok", 8),
        norm_topk_prob=config_json.get("norm_topk_prob", False),
        router_aux_loss_coef=config_json.get("router_aux_loss_coef", 0.01),
        **_FIXED,
    )


def to_hf_config(config: ModelConfig) -> Fields:
    return hf_config.write_decoder(
        config, "OlmoeForCausalLM", intermediate_size=config.expert_size, norm_topk_prob=config.norm_topk_prob,
        num_experts=config.n_expert, num_experts_per_tok=config.n_expert_per_token, output_router_logits=False,
        router_aux_loss_coef=config.router_aux_loss_coef,
    )  # fmt: skip


weight_map = tables.decoder_weights
