"""The Free Transformer (Fleuret 2025, arXiv 2510.17558) for toolkit. Imports no torch."""

from toolkit.errors import MissingName
from toolkit.extension import Extension

EXTENSION = Extension(
    families={
        "free_transformer": "toolkit_free_transformer.family",
        "free_baseline": "toolkit_free_transformer.baselines",
    },
    data={"Letters": "toolkit_free_transformer.letters.Letters"},
)


_MODEL_CONFIG = (
    'use get_config("free-transformer-tiny") of toolkit.models.families, or toolkit.ModelConfig with '
    'family="free_transformer", n_embd=..., n_layer=..., n_head=..., family_options={"latent_bits": 16}'
)


def __getattr__(name: str):
    if name == "FreeTransformer":
        from toolkit_free_transformer.model import FreeTransformer

        return FreeTransformer
    if name == "DecoderBlock":  # the class of an FSDP unit
        from toolkit.models.block import Block

        return Block
    if name == "ModelConfig":
        return MissingName("toolkit_free_transformer.ModelConfig", _MODEL_CONFIG)
    raise AttributeError(name)
