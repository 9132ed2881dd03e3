"""The Free Transformer (Fleuret 2025, arXiv 2510.17558) for toolkit. Imports no torch."""

from toolkit.extension import Extension

EXTENSION = Extension(
    families={
        "free_transformer": "toolkit_free_transformer.family",
        "free_baseline": "toolkit_free_transformer.baselines",
    },
    data={"Letters": "toolkit_free_transformer.letters.Letters"},
)


def __getattr__(name: str):
    if name == "FreeTransformer":
        from toolkit_free_transformer.model import FreeTransformer

        return FreeTransformer
    raise AttributeError(name)
