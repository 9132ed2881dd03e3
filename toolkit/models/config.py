"""The facts of an architecture: numbers and names, no behaviour, no torch.

Field names follow LitGPT's ``model_config.yaml``, so that its checkpoints can be read as they are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, make_dataclass, replace
from typing import Any, Literal, get_type_hints

from toolkit.errors import UserError

# The keys of rope_adjustments, as LitGPT names them.
ROPE_ADJUSTMENTS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}

_CHOICES = {
    "position_embedding": ("rope", "learned"),
    "norm_class_name": ("RMSNorm", "LayerNorm"),
    "mlp_class_name": ("LLaMAMLP", "GptNeoxMLP"),
    "gelu_approximate": ("none", "tanh"),
}

_POSITIVE = (
    "block_size", "n_layer", "n_head", "n_embd", "vocab_size", "padded_vocab_size", "padding_multiple",
    "intermediate_size", "head_size",
)  # fmt: skip

# Fields of LitGPT's configurations that are not ours, with the value that changes nothing. Fields that only matter
# together with another one (rope_indices, ...) are let through: the other one is not.
_NEUTRAL = {"norm_1": True, "norm_2": True, "rope_condense_ratio": 1, "routed_scaling_factor": 1.0}
_DESCRIPTIVE = {"hf_config", "norm_qk_type", "rope_indices", "sliding_window_indices", "n_expert_per_token"}


def _changes_nothing(name: str, value: Any, values: dict[str, Any]) -> bool:
    """Whether a field of LitGPT's that this version does not know has a value that leaves the model as it is."""
    if name == "attention_scores_scalar" and value is not None:
        return value == values.get("head_size")  # the same as not set
    if name in _NEUTRAL:
        return value == _NEUTRAL[name]
    return name in _DESCRIPTIVE or not value


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
        rope_adjustments: Llama 3's scaling: factor, low_freq_factor, high_freq_factor, original_max_seq_len.
        position_embedding: "rope", or "learned" for a table of positions added to the embedding.
        parallel_residual: Attention and MLP read the same input and are added together.
        shared_attention_norm: With parallel_residual, one norm serves both.
        bias: Linear layers have biases.
        attn_bias: The qkv projection has a bias even if bias is false.
        lm_head_bias: The head has a bias.
        norm_class_name: "RMSNorm" or "LayerNorm".
        norm_eps: Added to the variance.
        mlp_class_name: "LLaMAMLP" (gated) or "GptNeoxMLP" (two layers).
        gelu_approximate: "none" or "tanh", for GptNeoxMLP.
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
    position_embedding: Literal["rope", "learned"] = "rope"
    parallel_residual: bool = False
    shared_attention_norm: bool = False
    bias: bool = False
    attn_bias: bool = False
    lm_head_bias: bool = False
    norm_class_name: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    norm_eps: float = 1e-5
    mlp_class_name: Literal["LLaMAMLP", "GptNeoxMLP"] = "LLaMAMLP"
    gelu_approximate: Literal["none", "tanh"] = "none"
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        self._check_choices()
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"--model_config.{name} {value}: must be greater than zero")
        if not 0 <= self.rotary_percentage <= 1:
            raise UserError(f"--model_config.rotary_percentage {self.rotary_percentage}: must be between 0 and 1")
        set_field = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        if self.n_query_groups is None:
            set_field("n_query_groups", self.n_head)
        if self.n_query_groups <= 0 or self.n_head % self.n_query_groups:
            raise UserError(f"--model_config.n_query_groups {self.n_query_groups}: must divide n_head {self.n_head}")
        if self.head_size is None:
            if self.n_embd % self.n_head:
                raise UserError(f"--model_config.n_embd {self.n_embd}: must be a multiple of n_head {self.n_head}")
            set_field("head_size", self.n_embd // self.n_head)
        if self.intermediate_size is None:
            set_field("intermediate_size", 4 * self.n_embd)
        if self.position_embedding == "rope" and self.rope_n_elem % 2:
            raise UserError(f"--model_config.head_size {self.head_size}: an odd number of elements cannot be rotated")
        if self.vocab_size is not None:
            if self.padded_vocab_size is None:
                multiple = self.padding_multiple
                set_field("padded_vocab_size", -(-self.vocab_size // multiple) * multiple)
            if self.padded_vocab_size < self.vocab_size:
                raise UserError(
                    f"--model_config.padded_vocab_size {self.padded_vocab_size}: "
                    f"smaller than vocab_size {self.vocab_size}"
                )

    def _check_choices(self) -> None:
        """Refuse words that are none of a field's choices, and combinations that no model has."""
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise UserError(f"--model_config.{name} {value}: must be one of {', '.join(choices)}")
        if self.shared_attention_norm and not self.parallel_residual:
            raise UserError("--model_config.shared_attention_norm true: needs --model_config.parallel_residual true")
        if self.rope_adjustments is not None and self.rope_adjustments.keys() != ROPE_ADJUSTMENTS:
            raise UserError(
                f"--model_config.rope_adjustments {self.rope_adjustments}: only Llama 3's scaling is known, "
                f"with the keys {', '.join(sorted(ROPE_ADJUSTMENTS))}"
            )

    @property
    def rope_n_elem(self) -> int:
        """Elements of each head that are rotated."""
        return int(self.rotary_percentage * self.head_size)

    def with_vocab_size(self, vocab_size: int) -> ModelConfig:
        """Return the config with the vocabulary of a tokenizer, where it does not bring its own."""
        return self if self.vocab_size is not None else replace(self, vocab_size=vocab_size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Make a config from the content of a ``model_config.yaml``, ours or LitGPT's.

        Raises:
            UserError: A part of the model that this version does not know would change the mathematics.
        """
        known = {f.name for f in fields(cls)}
        for name, value in values.items():
            if name not in known and not _changes_nothing(name, value, values):
                raise UserError(f"{name} {value}: this version cannot compute such a model")
        config = {k: v for k, v in values.items() if k in known}
        if "family" not in config:  # LitGPT's files do not say
            if any(part in str(values.get("name")) for part in ("Gemma", "OLMo")):  # that, nothing but the name says
                raise UserError(f"name {values['name']}: the norms of this model are not supported")
            config["family"] = "llama" if config.get("mlp_class_name", "LLaMAMLP") == "LLaMAMLP" else "gpt_neox"
        return cls(**config)

    def override(self, overrides: ModelOverrides) -> ModelConfig:
        """Return the config with the fields that the user set; what is derived from them is derived again."""
        given = {f.name: v for f in fields(overrides) if (v := getattr(overrides, f.name)) is not None}
        derived = {
            "n_query_groups": {"n_head"}, "head_size": {"n_head", "n_embd"}, "intermediate_size": {"n_embd"},
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
