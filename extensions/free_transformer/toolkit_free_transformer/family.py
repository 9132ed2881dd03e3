"""The model family: configurations, options, and conversion from and to Hugging Face folders. Imports no torch.

Layers, widths and heads are the paper's for its 1.5B and 8B models. Values that the paper does not report come from
the model with the same shape (Qwen2.5 1.5B with tied embeddings, Llama 3 8B), with Llama 3's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from toolkit.errors import UserError, did_you_mean
from toolkit.models.config import ModelConfig
from toolkit.models.families import hf_config, llama, tables
from toolkit.models.families.named import named_with
from toolkit.models.families.tables import WeightMapping

MODEL = "toolkit_free_transformer.model.FreeTransformer"
IN_TRANSFORMERS = False
MAX_BITS = 16
_FLAG = "--model_config.family_options"


@dataclass(frozen=True)
class LatentOptions:
    """``ModelConfig.family_options`` of a Free Transformer.

    Args:
        latent_bits: H, the latent bits per token, for 2^H codes. ``latent_dim`` is an alias.
        free_bits: kappa, the bits of KL divergence per token without a penalty in training.
        mapper: How to map a code to a vector. "exact": one vector per code (2^H), with the gradient of Eq. 8;
            "factored": the sum of one vector per bit, with a gradient through each bit.
        encoder: Whether the model has an encoder. Without it the model can only generate, with latents from the prior.
    """

    latent_bits: int = 16
    free_bits: float = 0.5
    mapper: Literal["exact", "factored"] = "exact"
    encoder: bool = True

    def __post_init__(self) -> None:
        bits, free = self.latent_bits, self.free_bits
        if type(bits) is not int or not 1 <= bits <= MAX_BITS:
            codes = f"2^{bits} codes need as many vectors; " if type(bits) is int and bits > 0 else ""
            raise UserError(f"{_FLAG}.latent_bits {bits}: {codes}must be an integer from 1 to {MAX_BITS}")
        if type(free) not in (int, float) or not 0 <= free <= bits:
            raise UserError(f"{_FLAG}.free_bits {free}: must be from 0 to latent_bits {bits}")
        if self.mapper not in ("exact", "factored"):
            raise UserError(f"{_FLAG}.mapper {self.mapper}: must be exact or factored")
        if type(self.encoder) is not bool:
            raise UserError(f"{_FLAG}.encoder {self.encoder}: must be true or false")

    @classmethod
    def of(cls, config: ModelConfig) -> LatentOptions:
        """Read the options from a configuration.

        Raises:
            UserError: An option is unknown or has an invalid value.
        """
        options = dict(config.family_options or {})
        if "latent_dim" in options:
            options["latent_bits"] = options.pop("latent_dim")
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                hint = did_you_mean(name, names) or f"; use {', '.join(names)}"
                raise UserError(f"{_FLAG}.{name}: no such option of this family{hint}")
        return cls(**options)


_free = named_with(family="free_transformer")
_TINY_LATENT = {"latent_bits": 6, "free_bits": 1.0}
SHAPE_TINY, SHAPE_1_5B, SHAPE_8B = (2, 64, 4, 2, 128), (28, 1536, 12, 2, 8960), (32, 4096, 32, 8, 14336)
PAPER = {"block_size": 4096, "vocab_size": 128256, "rope_base": 500000.0}

CONFIGS = [
    _free("free-transformer-tiny", *SHAPE_TINY, block_size=256, tie_embeddings=True, family_options=_TINY_LATENT),
    _free("free-transformer-1.5b", *SHAPE_1_5B, **PAPER, tie_embeddings=True),
    _free("free-transformer-8b", *SHAPE_8B, **PAPER),
]
ALIASES: dict[str, str] = {}


def validate(config: ModelConfig) -> None:
    """Check options and architecture.

    Raises:
        UserError: An option is invalid, or the decoder is not a Llama.
    """
    LatentOptions.of(config)
    if config.n_layer < 2:
        raise UserError(
            f"--model_config.n_layer {config.n_layer}: must be at least 2, because latents enter in the middle"
        )
    if config.rope_kind == "longrope":
        raise UserError("--model_config.rope_adjustments: longrope is not supported by free_transformer; remove it")
    decoder = replace(config, family_options=None)
    hf_config.require_same(decoder, llama.from_hf_config(llama.to_hf_config(decoder)))


check = validate


def from_hf_config(config_json: dict[str, Any]) -> ModelConfig:
    """Return the config for a ``config.json`` written by :func:`to_hf_config`."""
    options = {f.name: config_json[f"latent_{f.name}"] for f in fields(LatentOptions)}
    return replace(llama.from_hf_config(config_json), family_options=options)


def to_hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of ``config.json``: a Llama's, with the latent options."""
    options = {f"latent_{name}": value for name, value in vars(LatentOptions.of(config)).items()}
    return llama.to_hf_config(config) | {"architectures": ["FreeTransformerForCausalLM"]} | options


def weight_map(config: ModelConfig) -> list[WeightMapping]:
    """Return the weight map. The decoder has Llama's names; encoder and latent weights keep toolkit's names."""
    maps = tables.decoder_weights(config)
    names = ["latent.weight"]
    if LatentOptions.of(config).encoder:
        names += ["encoder.query", "encoder.readout.weight"]
        maps += [_of_encoder(entry) for entry in maps if entry.native[0].startswith("transformer.h.0.")]
    return maps + [WeightMapping((name,), (f"model.{name}",)) for name in names]


def _of_encoder(entry: WeightMapping) -> WeightMapping:
    """Return the encoder's entry that corresponds to an entry of the first block."""
    native = tuple(name.replace("transformer.h.0.", "encoder.block.") for name in entry.native)
    hf = tuple(name.replace("model.layers.0.", "model.encoder.block.") for name in entry.hf)
    return WeightMapping(native, hf, entry.transforms)
