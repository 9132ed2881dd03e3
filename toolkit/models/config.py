"""The facts of an architecture: numbers and names, no behaviour, no torch.

Field names follow LitGPT's ``model_config.yaml``, so that its checkpoints can be read as they are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from typing import Any, Literal, get_type_hints

from toolkit.errors import UserError
from toolkit.models.config_checks import check_together, check_values, rope_kind


@dataclass(frozen=True)
class ModelConfig:
    """One architecture.

    Args:
        name: The name of the configuration, for people.
        family: The Hugging Face ``model_type`` whose ``config.json`` and weight names this architecture has.
        block_size: The longest sequence, in tokens.
        vocab_size: Tokens in the vocabulary; None takes the tokenizer's.
        padded_vocab_size: Rows of embedding and head; vocab_size rounded up to a multiple of padding_multiple.
        padding_multiple: See padded_vocab_size.
        n_layer: Number of blocks.
        n_head: Query heads.
        n_query_groups: Key and value heads; n_head when not given (no grouping).
        n_embd: Width of the residual stream.
        head_size: Width of one head; n_embd / n_head when not given.
        intermediate_size: Width of the MLP; 4 x n_embd when not given.
        rotary_percentage: Share of each head that is rotated.
        rope_base: Base of the rotary frequencies (theta).
        rope_adjustments: How the frequencies are scaled; the keys tell the kind (linear, llama3, yarn or longrope), see
            ROPE_ADJUSTMENTS in models/config_checks.py.
        rope_local_base_freq: Base of the unscaled frequencies of the layers with rope index 1.
        rope_indices: Of each layer: 0 rotates by rope_base and rope_adjustments, 1 by rope_local_base_freq, -1 not at
            all; all 0 when not given.
        position_embedding: "rope", or "learned" for a table of positions added to the embedding.
        sliding_window_size: How many tokens back a token sees, itself included, in the layers with a window.
        sliding_window_indices: Of each layer: 1 has the window, 0 has none; all 1 when not given.
        attention_scores_scalar: Queries times keys are divided by the root of it; head_size when not given.
        attention_multiplier: Queries times keys are multiplied by this instead (Granite).
        attention_logit_softcapping: Caps the scores: c * tanh(score / c).
        final_logit_softcapping: Caps the logits likewise.
        norm_qk: Queries and keys are normalised before they are rotated.
        norm_qk_type: "default", each head by itself, all with the same weights; "per_head", with weights of its own
            (LayerNorm without bias: StableLM 2 12B); or "olmo2", all heads of a token together.
        attention_sinks: Each head has one learned score more, of a key without a value, which takes its share of the
            softmax (gpt-oss).
        latent_attention: Keys and values are made from a small vector per token, and so may queries be (DeepSeek's
            multi-head latent attention): the sizes q_lora_rank (may be left out), kv_lora_rank, qk_nope_head_dim,
            qk_rope_head_dim and v_head_dim. head_size is then qk_nope_head_dim + qk_rope_head_dim, of which the latter
            are rotated.
        clip_qkv: Queries, keys and values are clamped to plus and minus this.
        scale_embeddings: The embedding is multiplied by the root of n_embd.
        embedding_multiplier: The embedding is multiplied by this (Granite).
        residual_multiplier: What attention and MLP add to the residual stream is multiplied by this (Granite).
        logits_scaling: Logits are divided by this (Granite).
        parallel_residual: Attention and MLP read the same input and are added together.
        shared_attention_norm: With parallel_residual, one norm serves both.
        bias: Linear layers have biases, router and experts among them.
        attn_bias: The qkv projection has a bias even if bias is false.
        lm_head_bias: The head has a bias.
        norm_class_name: "RMSNorm" or "LayerNorm".
        norm_eps: Added to the variance.
        norm_offset: Norms multiply by 1 + weight instead of weight (Gemma).
        norm_affine: Norms have weights.
        norm_1: Attention reads a norm of the residual stream; otherwise the stream itself.
        norm_2: The same for the MLP.
        post_attention_norm: What attention adds to the residual stream is normalised.
        post_mlp_norm: The same for the MLP.
        mlp_class_name: "LLaMAMLP" (gated, silu), "GemmaMLP" (gated, gelu), "GptNeoxMLP" (two layers, gelu) or
            "LLaMAMoE" (experts, each a LLaMAMLP, of which a router chooses some for each token).
        n_expert: Experts of a LLaMAMoE.
        n_expert_per_token: How many of them a token goes to.
        moe_intermediate_size: Width of each expert; intermediate_size when not given.
        norm_topk_prob: The weights of a token's experts are scaled to a sum of 1.
        routed_scaling_factor: The weights are then multiplied by this.
        router_scores: "softmax" of the router's logits, or "sigmoid" (DeepSeek-V3), where a bias per expert, which is
            no part of the weights, is added to the scores for the choice.
        n_expert_groups: The experts are in so many groups, and a token goes to those of a few of them only.
        n_topk_groups: To how many.
        shared_expert_intermediate_size: Width of one more expert, which every token goes to; none when not given.
        shared_expert_gate: That one has a gate of its own (Qwen2-MoE).
        swiglu_limit: In the experts, the gate is clamped from above and the other part from both sides; their product
            is gate * sigmoid(1.702 gate) * (other + 1) (gpt-oss).
        moe_indices: Of each layer: 1 has experts, 0 a LLaMAMLP of intermediate_size; all 1 when not given.
        router_aux_loss_coef: In training, the loss is greater by this times how unevenly the experts are used, see
            :func:`toolkit.models.moe.imbalance`; 0 for nothing.
        gelu_approximate: "none" or "tanh", for gelu.
        tie_embeddings: Embedding and head are one tensor.
    """

    name: str = ""
    family: str = "llama"
    block_size: int = 2048
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    padding_multiple: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_query_groups: int | None = None
    n_embd: int = 64
    head_size: int | None = None
    intermediate_size: int | None = None
    rotary_percentage: float = 1.0
    rope_base: float = 10000.0
    rope_adjustments: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    rope_indices: list[int] | None = None
    position_embedding: Literal["rope", "learned"] = "rope"
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None
    attention_scores_scalar: float | None = None
    attention_multiplier: float | None = None
    attention_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    norm_qk: bool = False
    norm_qk_type: Literal["default", "olmo2", "per_head"] = "default"
    attention_sinks: bool = False
    latent_attention: dict[str, int | None] | None = None
    clip_qkv: float | None = None
    scale_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    parallel_residual: bool = False
    shared_attention_norm: bool = False
    bias: bool = False
    attn_bias: bool = False
    lm_head_bias: bool = False
    norm_class_name: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    norm_affine: bool = True
    norm_1: bool = True
    norm_2: bool = True
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    mlp_class_name: Literal["LLaMAMLP", "GemmaMLP", "GptNeoxMLP", "LLaMAMoE"] = "LLaMAMLP"
    n_expert: int = 0
    n_expert_per_token: int = 0
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    n_expert_groups: int | None = None
    n_topk_groups: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = True
    swiglu_limit: float | None = None
    moe_indices: list[int] | None = None
    router_aux_loss_coef: float = 0.001
    gelu_approximate: Literal["none", "tanh"] = "none"
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_values(self)
        settle = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        if self.latent_attention is not None:
            settle("latent_attention", {"q_lora_rank": None} | self.latent_attention)
            parts = [self.latent_attention.get(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
            if self.head_size is None and all(type(n) is int for n in parts):
                settle("head_size", sum(parts))
        if self.n_query_groups is None:
            settle("n_query_groups", self.n_head)
        if self.head_size is None:
            if self.n_embd % self.n_head:
                raise UserError(f"--model_config.n_embd {self.n_embd}: must be a multiple of n_head {self.n_head}")
            settle("head_size", self.n_embd // self.n_head)
        if self.intermediate_size is None:
            settle("intermediate_size", 4 * self.n_embd)
        if self.vocab_size is not None and self.padded_vocab_size is None:
            settle("padded_vocab_size", -(-self.vocab_size // self.padding_multiple) * self.padding_multiple)
        for name in ("sliding_window_indices", "rope_indices", "moe_indices"):  # LitGPT's may be longer
            if (values := getattr(self, name)) is not None:
                settle(name, list(values[: self.n_layer]))
        check_together(self)

    @property
    def rope_kind(self) -> str | None:
        """Which of :data:`~toolkit.models.config_checks.ROPE_ADJUSTMENTS` scales the frequencies; None for nothing."""
        return rope_kind(self.rope_adjustments)

    @property
    def original_max_position(self) -> int | None:
        """The length beyond which a sequence is rotated otherwise (longrope); None where all are rotated alike."""
        return self.rope_adjustments["original_max_seq_len"] if self.rope_kind == "longrope" else None

    @property
    def attention_scale(self) -> float:
        """What queries times keys are multiplied by."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        scale = float(self.attention_scores_scalar or self.head_size) ** -0.5
        if self.latent_attention is None or self.rope_kind != "yarn":
            return scale
        # as DeepSeek trains it for YaRN: queries and keys by yarn's factor each, rotated or not
        share = self.rope_adjustments.get("mscale_all_dim") or 0.0
        return scale * (0.1 * share * math.log(max(self.rope_adjustments["factor"], 1.0)) + 1.0) ** 2

    @property
    def value_size(self) -> int:
        """Width of one head's values."""
        return self.head_size if self.latent_attention is None else self.latent_attention["v_head_dim"]

    def window(self, layer: int) -> int | None:
        """How many tokens back a token of this layer sees, itself included; None for all."""
        indices = self.sliding_window_indices
        return self.sliding_window_size if indices is None or indices[layer] else None

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of this layer is a LLaMAMoE."""
        return self.mlp_class_name == "LLaMAMoE" and (self.moe_indices is None or bool(self.moe_indices[layer]))

    @property
    def expert_size(self) -> int:
        """Width of each expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def n_moe_layer(self) -> int:
        """Layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layer))

    def rope_index(self, layer: int) -> int:
        """See ``rope_indices``."""
        return 0 if self.rope_indices is None else self.rope_indices[layer]

    @property
    def rope_n_elem(self) -> int:
        """Elements of each head that are rotated."""
        if self.latent_attention is not None:
            return self.latent_attention["qk_rope_head_dim"]
        return int(self.rotary_percentage * self.head_size)

    def with_vocab_size(self, vocab_size: int) -> ModelConfig:
        """Return the config with the vocabulary of a tokenizer, where it does not bring its own."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Make a config from the content of a ``model_config.yaml``.

        Raises:
            UserError: A part of the model that this version does not know would change the mathematics.
        """
        known = {f.name for f in fields(cls)}
        for name, value in values.items():
            if name not in known and value:  # a later version's field; without a value it changes nothing
                raise UserError(f"{name} {value}: this version cannot compute such a model")
        return cls(**{name: value for name, value in values.items() if name in known})

    def override(self, overrides: ModelOverrides) -> ModelConfig:
        """Return the config with the fields that the user set; what is derived from them is derived again."""
        given = {f.name: v for f in fields(overrides) if (v := getattr(overrides, f.name)) is not None}
        derived = {
            "n_query_groups": {"n_head"}, "head_size": {"n_head", "n_embd", "latent_attention"},
            "intermediate_size": {"n_embd"},
            "padded_vocab_size": {"vocab_size", "padding_multiple"},
        }  # fmt: skip
        again = {k: None for k, sources in derived.items() if k not in given and sources & given.keys()}
        return replace(self, **again, **given)


ModelOverrides = make_dataclass(
    "ModelOverrides",
    [(name, hint | None, None) for name, hint in get_type_hints(ModelConfig).items()],
    namespace={
        "__doc__": "Single fields of the model's configuration, set over those of the named one.\n\n    Args:"
        + ModelConfig.__doc__.partition("Args:")[2]
    },
)
ModelOverrides.__module__ = __name__
