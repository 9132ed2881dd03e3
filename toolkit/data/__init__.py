"""Training data: data modules, preparation, tokenizer, and sample order.

Importing the data modules does not import torch, litdata or tokenizers.
"""

from toolkit.data.base import DataModule, PreparedData, TokenDataset
from toolkit.data.mixture import Mixture
from toolkit.data.sft.classification import Classification
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
    Preference,
)
from toolkit.data.streamed.hugging_face_text import HuggingFaceText, OpenWebText, RedPajama, TinyStories
from toolkit.data.text.text_files import CharText, PythonStdlib, TextFiles
from toolkit.data.tokens.lit_data import LitData
from toolkit.data.tokens.synthetic import SyntheticTokens

__all__ = [
    "CSV", "JSON", "LIMA", "Alpaca", "Alpaca2k", "AlpacaGPT4", "CharText", "Classification", "DataModule", "Dolly",
    "HuggingFace", "HuggingFaceText", "InstructionData", "LitData", "Mixture", "OpenWebText", "Parquet", "Preference",
    "PreparedData", "PythonStdlib", "RedPajama", "SyntheticTokens", "TextFiles", "TinyStories", "TokenDataset",
]  # fmt: skip
