"""Training data: data modules, preparation, tokenizer, and sample order.

A data module is imported on first use, without torch, litdata or tokenizers.
"""

from typing import TYPE_CHECKING

from toolkit.data.base import DataModule, PreparedData, TokenDataset
from toolkit.extension import import_by_name

if TYPE_CHECKING:
    from toolkit.data.mixture import Mixture
    from toolkit.data.sft.datasets import (
        CSV,
        JSON,
        LIMA,
        Alpaca,
        Alpaca2k,
        AlpacaGPT4,
        Dolly,
        HuggingFace,
        InstructionData,
        Parquet,
    )
    from toolkit.data.streamed.hugging_face_text import HuggingFaceText, OpenWebText, RedPajama, TinyStories
    from toolkit.data.text.text_files import CharText, PythonStdlib, TextFiles
    from toolkit.data.tokens.lit_data import LitData
    from toolkit.data.tokens.synthetic import SyntheticTokens

__all__ = [
    "CSV", "JSON", "LIMA", "Alpaca", "Alpaca2k", "AlpacaGPT4", "CharText", "DataModule", "Dolly",
    "HuggingFace", "HuggingFaceText", "InstructionData", "LitData", "Mixture", "OpenWebText", "Parquet",
    "PreparedData", "PythonStdlib", "RedPajama", "SyntheticTokens", "TextFiles", "TinyStories", "TokenDataset",
]  # fmt: skip

_HOMES = {
    "mixture": "Mixture",
    "sft.datasets": "CSV JSON LIMA Alpaca Alpaca2k AlpacaGPT4 Dolly HuggingFace Parquet",
    "streamed.hugging_face_text": "HuggingFaceText OpenWebText RedPajama TinyStories",
    "text.text_files": "CharText PythonStdlib TextFiles",
    "tokens.lit_data": "LitData",
    "tokens.synthetic": "SyntheticTokens",
}
CLASSES = {name: f"{__name__}.{home}.{name}" for home, names in _HOMES.items() for name in names.split()}
"""The dotted paths of toolkit's data modules, by name, for ``--data``."""

__getattr__ = import_by_name(__name__, CLASSES | {"InstructionData": f"{__name__}.sft.datasets.InstructionData"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
