"""The model configuration: plain values, checked on creation. Does not import torch.

Field names follow LitGPT's ``model_config.yaml``, so LitGPT checkpoints load unchanged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from toolkit.config.other_tools import suggest_option
from toolkit.errors import UserError, did_you_mean, require_option
from toolkit.models.config_checks import (
    DERIVED,
    FLAG,
    GROUP,
    HEAD_FIELDS,
    HeadName,
    ProblemType,
    check_combinations,
    check_values,
    derived_values,
    rope_kind,
    yarn_mscale,
)

Fields = dict[str, Any]
"""Values by name: of a :class:`ModelConfig`, or of a config.json."""
_DERIVED: Any = None  # default of a field that is derived from other fields


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model architecture.

    Args:
        name: Display name of the configuration.
        family: The Hugging Face ``model_type``, which determines ``config.json`` and weight names.
        block_size: Maximum sequence length in tokens.
        vocab_size: Vocabulary size; None uses the tokenizer's.
        padded_vocab_size: Rows of embedding and head; vocab_size rounded up to a multiple of padding_multiple.
        padding_multiple: See padded_vocab_size.
        n_layer: Number of transformer blocks.
        n_head: Number of query heads.
        n_query_groups: Number of key and value heads; default n_head (no grouping).
        n_embd: Hidden size.
        head_size: Head dimension; default n_embd / n_head.
        intermediate_size: MLP width; default 4 x n_embd.
        rotary_percentage: Fraction of each head that is rotated (partial rotary).
        rope_base: Base of the rotary frequencies (theta).
        rope_adjustments: RoPE scaling; the keys determine the type (linear, llama3, yarn or longrope), see
            ROPE_ADJUSTMENTS in models/config_checks.py.
        rope_local_base_freq: Rotary base (theta), unscaled, of the layers with rope index 1.
        query_scaling_beta: Multiply queries by 1 + beta * ln(1 + floor(position / original_max_seq_len)), with YaRN's
            original_max_seq_len (Ministral 3).
        rope_indices: One entry per layer: 0 uses rope_base and rope_adjustments, 1 uses rope_local_base_freq, -1
            disables RoPE; default all 0.
        position_embedding: "rope", or "learned" for learned absolute positions.
        sliding_window_size: Sliding-window size in tokens, the current token included.
        sliding_window_indices: One entry per layer: 1 for a sliding window, 0 for full attention; default all 1.
        attention_scores_scalar: Attention scores are divided by its square root; default head_size.
        attention_multiplier: Scale of the attention scores; replaces attention_scores_scalar (Granite).
        attention_logit_softcapping: Soft cap c of the attention scores: c * tanh(score / c).
        final_logit_softcapping: Soft cap of the logits.
        norm_qk: QK-norm: normalize queries and keys.
        norm_qk_after_rope: QK-norm follows RoPE instead of preceding it (Hunyuan).
        norm_qk_type: "default", per head with shared weights; "per_head", per head with separate weights (LayerNorm
            without bias: StableLM 2 12B); or "olmo2", over all heads of a token.
        attention_sinks: Attention sinks: one learned logit per head that takes part in the softmax (gpt-oss).
        latent_attention: Multi-head latent attention (MLA, DeepSeek), with the sizes q_lora_rank (optional),
            kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim. head_size is then qk_nope_head_dim +
            qk_rope_head_dim; only the latter part is rotated.
        linear_attention: Linear attention (Gated DeltaNet), with the sizes n_key_heads, n_value_heads, key_size and
            value_size (per head) and conv_size (tokens of the short convolution).
        linear_attention_indices: With linear_attention, one entry per layer: 1 for linear attention, 0 for attention;
            default all 1.
        attention_gate: Multiply the output of attention by the sigmoid of a gate per element, projected with the
            queries (Qwen3-Next).
        clip_qkv: QKV clipping: queries, keys and values are clamped to [-clip_qkv, clip_qkv].
        scale_embeddings: Multiply the embeddings by sqrt(n_embd).
        embedding_multiplier: Multiply the embeddings by this (Granite).
        residual_multiplier: Multiply the outputs of attention and MLP by this before the residual addition (Granite).
        logits_scaling: Divide the logits by this (Granite).
        parallel_residual: Parallel residual: attention and MLP read the same input, and both outputs are added.
        shared_attention_norm: With parallel_residual, attention and MLP share one norm.
        bias: Linear layers have biases, including router and experts.
        attn_bias: The QKV projection has a bias even if bias is false.
        attn_proj_bias: The output projection of attention has a bias even if bias is false.
        lm_head_bias: The LM head has a bias.
        norm_class_name: "RMSNorm" or "LayerNorm".
        norm_eps: Epsilon added to the variance.
        norm_offset: Norms multiply by 1 + weight instead of weight (Gemma).
        norm_affine: Norms have learned weights.
        norm_bias: LayerNorms with learned weights have learned biases, too.
        norm_1: Pre-norm before attention.
        norm_2: Pre-norm before the MLP.
        post_attention_norm: Post-norm: normalize the output of attention before the residual addition.
        post_mlp_norm: Post-norm: normalize the output of the MLP before the residual addition.
        mlp_class_name: "LLaMAMLP" (SwiGLU), "GemmaMLP" (GeGLU), "GptNeoxMLP" (non-gated, GELU), "XieluMLP" (non-gated,
            xIELU: Apertus) or "LLaMAMoE" (mixture of experts, each a LLaMAMLP).
        n_expert: Number of experts of a LLaMAMoE.
        n_expert_per_token: Number of experts per token (top-k).
        moe_intermediate_size: Width of each expert; default intermediate_size.
        norm_topk_prob: Normalize the top-k router weights to sum to 1.
        routed_scaling_factor: Multiply the router weights by this.
        router_scores: Router activation: "softmax", or "sigmoid" (DeepSeek-V3) or "biased_softmax" (ERNIE 4.5) with a
            selection bias per expert, which is a buffer and not trained.
        n_expert_groups: Number of expert groups for group-limited routing.
        n_topk_groups: Number of expert groups per token.
        shared_expert_intermediate_size: Width of the shared expert; default no shared expert.
        shared_expert_gate: The shared expert has a sigmoid gate (Qwen2-MoE).
        swiglu_limit: Clamp limit of the experts' SwiGLU, gate * sigmoid(1.702 gate) * (up + 1). gate is clamped from
            above, up on both sides (gpt-oss).
        moe_indices: One entry per layer: 1 for experts, 0 for a dense LLaMAMLP of intermediate_size; default all 1.
        router_aux_loss_coef: Coefficient of the load-balancing loss added to the training loss, see
            :func:`toolkit.models.moe.load_balancing_loss`; 0 disables it.
        gelu_approximate: GELU approximation, "none" or "tanh".
        tie_embeddings: Tie the LM head to the embedding.
        family_options: Options of a model family that has its own model, such as Gemma 4 or an extension's; see there.
            full_attention, n_shared_kv_layers and keys_are_values mean the same in every family.
        qat: Quantization of the blocks' linear layers in the forward pass, with weights, group_size and dtype, by the
            extension that has a quantizer, see :class:`toolkit.models.quantizer.Quantizer`.
        head: A score layer in place of the LM head: "classification" (also regression), "reward" or
            "token_reward".
        labels: Names of the scores.
        problem_type: Kind of classification: one label per text, any number of labels, or a number.
    """

    name: str = ""
    family: str = "llama"
    block_size: int = 2048
    vocab_size: int | None = None
    padded_vocab_size: int = _DERIVED
    padding_multiple: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_query_groups: int = _DERIVED
    n_embd: int = 64
    head_size: int = _DERIVED
    intermediate_size: int = _DERIVED
    rotary_percentage: float = 1.0
    rope_base: float = 10000.0
    rope_adjustments: dict[str, Any] | None = None
    rope_local_base_freq: float | None = None
    query_scaling_beta: float | None = None
    rope_indices: list[int] | None = None
    position_embedding: Literal["rope", "learned"] = "rope"
    sliding_window_size: int | None = None
    sliding_window_indices: list[int] | None = None
    attention_scores_scalar: float | None = None
    attention_multiplier: float | None = None
    attention_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    norm_qk: bool = False
    norm_qk_after_rope: bool = False
    norm_qk_type: Literal["default", "olmo2", "per_head"] = "default"
    attention_sinks: bool = False
    latent_attention: dict[str, Any] | None = None
    linear_attention: dict[str, Any] | None = None
    linear_attention_indices: list[int] | None = None
    attention_gate: bool = False
    clip_qkv: float | None = None
    scale_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    parallel_residual: bool = False
    shared_attention_norm: bool = False
    bias: bool = False
    attn_bias: bool = False
    attn_proj_bias: bool = False
    lm_head_bias: bool = False
    norm_class_name: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-5
    norm_offset: bool = False
    norm_affine: bool = True
    norm_bias: bool = True
    norm_1: bool = True
    norm_2: bool = True
    post_attention_norm: bool = False
    post_mlp_norm: bool = False
    mlp_class_name: Literal["LLaMAMLP", "GemmaMLP", "GptNeoxMLP", "XieluMLP", "LLaMAMoE"] = "LLaMAMLP"
    n_expert: int = 0
    n_expert_per_token: int = 0
    moe_intermediate_size: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    router_scores: Literal["softmax", "sigmoid", "biased_softmax"] = "softmax"
    n_expert_groups: int | None = None
    n_topk_groups: int | None = None
    shared_expert_intermediate_size: int | None = None
    shared_expert_gate: bool = True
    swiglu_limit: float | None = None
    moe_indices: list[int] | None = None
    router_aux_loss_coef: float = 0.001
    gelu_approximate: Literal["none", "tanh"] = "none"
    tie_embeddings: bool = False
    family_options: dict[str, Any] | None = None
    qat: dict[str, Any] | None = None
    head: HeadName | None = None
    labels: list[str] | None = None
    problem_type: ProblemType | None = None

    def __new__(cls, *args: Any, **values: Any) -> ModelConfig:
        options = {f"model_config.{name}" for name in cls.__dataclass_fields__}
        for name in values.keys() - cls.__dataclass_fields__.keys():
            hint = suggest_option(name, options, lambda option: option.rpartition(".")[2])
            hint = hint or did_you_mean(name, cls.__annotations__, cutoff=0.75)
            hint = hint or "; an extension's options are in family_options={...}"
            raise UserError(f"ModelConfig({name}=...): no such field{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_values(vars(self), _HINTS)
        vars(self).update(derived_values(self))  # frozen
        check_combinations(self)

    def require(self, ok: bool, name: str, hint: str) -> None:
        """Raise a UserError about the field ``name`` unless ``ok``."""
        require_option(ok, f"{GROUP}{name}", getattr(self, name), hint)

    @property
    def rope_kind(self) -> str | None:
        """The RoPE scaling type, a key of :data:`~toolkit.models.config_checks.ROPE_ADJUSTMENTS`, or None."""
        return rope_kind(self.rope_adjustments)

    @property
    def original_max_position(self) -> int | None:
        """The sequence length in tokens above which longrope uses its long factors; None for other RoPE scalings."""
        return (self.rope_adjustments or {})["original_max_seq_len"] if self.rope_kind == "longrope" else None

    @property
    def attention_scale(self) -> float:
        """The scale of the attention scores."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        scale = float(self.attention_scores_scalar or self.head_size) ** -0.5
        if self.latent_attention is not None and self.rope_kind == "yarn" and self.rope_adjustments is not None:
            # DeepSeek applies YaRN's attention factor to queries and keys, including the dimensions without RoPE
            mscale = self.rope_adjustments.get("mscale_all_dim") or 0.0
            scale *= yarn_mscale(self.rope_adjustments["factor"], mscale) ** 2
        return scale

    @property
    def value_size(self) -> int:
        """Value dimension per head."""
        return self.head_size if self.latent_attention is None else self.latent_attention["v_head_dim"]

    def window(self, layer: int) -> int | None:
        """The layer's sliding-window size in tokens, including the current one; None for full attention."""
        indices = self.sliding_window_indices
        return self.sliding_window_size if indices is None or indices[layer] else None

    def layer(self, layer: int) -> ModelConfig:
        """Return the config of one layer: this one, unless its sizes differ."""
        sizes = (self.family_options or {}).get("full_attention")
        if sizes is None or self.window(layer) is not None:
            return self
        return replace(self, family_options=None, **sizes)

    @property
    def n_cached_layer(self) -> int:
        """Number of layers with keys and values; the last layers may share those of earlier ones."""
        return self.n_layer - (self.family_options or {}).get("n_shared_kv_layers", 0)

    def n_attention_parts(self, layer: int) -> int:
        """Return 3 for queries, keys and values; 2 if the keys are the values; 1 if the layer shares another's."""
        if layer >= self.n_cached_layer:
            return 1
        are_keys = (self.family_options or {}).get("keys_are_values") and self.window(layer) is None
        return 2 if are_keys else 3

    def has_linear_attention(self, layer: int) -> bool:
        """Whether this layer has linear attention in place of attention."""
        indices = self.linear_attention_indices
        return self.linear_attention is not None and (indices is None or bool(indices[layer]))

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's MLP is a LLaMAMoE."""
        return self.mlp_class_name == "LLaMAMoE" and (self.moe_indices is None or bool(self.moe_indices[layer]))

    @property
    def expert_size(self) -> int:
        """Width of each expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def n_moe_layer(self) -> int:
        """Number of layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.n_layer))

    def rope_index(self, layer: int) -> int:
        """The layer's entry in ``rope_indices``."""
        return 0 if self.rope_indices is None else self.rope_indices[layer]

    @property
    def rope_n_elem(self) -> int:
        """Number of rotated dimensions per head."""
        if self.latent_attention is not None:
            return self.latent_attention["qk_rope_head_dim"]
        return int(self.rotary_percentage * self.head_size)

    @property
    def n_labels(self) -> int:
        """Number of scores of the head; 1 until the labels of the data are known."""
        return len(self.labels or (1,))

    def with_head(self, head: HeadName) -> ModelConfig:
        """Return the config of this model with a score layer in place of the LM head."""
        labels = None if head == "classification" else ["reward"]
        return replace(self, head=head, labels=labels, problem_type=None, tie_embeddings=False)

    def without_head(self) -> ModelConfig:
        """Return the config of the language model."""
        return replace(self, head=None, labels=None, problem_type=None)

    def with_vocab_size(self, vocab_size: int | None) -> ModelConfig:
        """Return the config with this vocabulary size, unless it already has one."""
        if self.vocab_size is None and vocab_size is None:
            raise UserError(
                f"--tokenizer_dir: {self.name} takes its vocabulary from the tokenizer; give one, or {FLAG}vocab_size"
            )
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    def to_dict(self) -> Fields:
        unused = {*(() if self.head else HEAD_FIELDS), *(() if self.qat else ("qat",))}
        return {name: value for name, value in asdict(self).items() if name not in unused}

    @classmethod
    def from_dict(cls, values: Fields) -> ModelConfig:
        """Create a config from a parsed ``model_config.yaml``."""
        names = cls.__dataclass_fields__
        for name, value in values.items():
            if name not in names and value:  # a field of a later version; it has no effect while unset
                raise UserError(f"{name} {value}: unknown field, perhaps of a later version; upgrade toolkit")
        return cls(**{name: value for name, value in values.items() if name in names})

    def override(self, overrides: ModelOverrides) -> ModelConfig:
        """Return a copy with the user's overrides. Derived fields are recomputed."""
        values = {name: value for name, value in vars(overrides).items() if value is not None}
        changes: Fields = {k: None for k, sources in DERIVED.items() if sources & values.keys()}
        if "family_options" in values:  # the others keep their values
            values["family_options"] = (self.family_options or {}) | values["family_options"]
        return replace(self, **changes | values)


# Field types of user overrides.
_HINTS = {
    f.name: hint | None if f.default is None else hint
    for f, hint in zip(fields(ModelConfig), get_type_hints(ModelConfig).values(), strict=True)
    if f.name not in (*HEAD_FIELDS, "qat")
}

if TYPE_CHECKING:

    @dataclass
    class ModelOverrides:
        """Fields that override the named model configuration; None keeps the named value."""

        def __init__(self, **overrides: Any) -> None: ...

else:
    ModelOverrides = make_dataclass("ModelOverrides", [(name, hint | None, None) for name, hint in _HINTS.items()])
    ModelOverrides.__module__ = __name__
    ModelOverrides.__doc__ = "Fields that override the named model configuration.\n\n    Args:"
    ModelOverrides.__doc__ += ModelConfig.__doc__.partition("Args:")[2]
