"""Baseline Llamas with the shapes of the Free Transformers. Imports no torch."""

from toolkit.models.families.llama import from_hf_config, to_hf_config, weight_map
from toolkit.models.families.named import named
from toolkit_free_transformer.family import PAPER, SHAPE_1_5B, SHAPE_8B, SHAPE_TINY

__all__ = ["CONFIGS", "from_hf_config", "to_hf_config", "weight_map"]

CONFIGS = [
    named("free-baseline-tiny", *SHAPE_TINY, block_size=256, tie_embeddings=True),
    named("free-baseline-1.5b", *SHAPE_1_5B, **PAPER, tie_embeddings=True),
    named("free-baseline-8b", *SHAPE_8B, **PAPER),
]
