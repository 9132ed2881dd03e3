"""Convert SentencePiece tokenizers, which Hugging Face folders may contain instead of a tokenizer.json."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from toolkit.errors import one_line

# File names that transformers looks for; FILE_PATTERNS, which downloads fetch, must include all of them.
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
# Texts that both tokenizers must encode identically: spaces, other scripts, unknown characters, line ends, digits. No
# leading space: there transformers differs from SentencePiece.
_PROBES = ("Hello world", "two  spaces ", "Grüße, 你好, مرحبا 🎉", "a\nb\n\n\tc", "1234567.89 + x_i == y", "")


def find_sentencepiece(hf_dir: Path) -> Path | None:
    """Return the SentencePiece model of a folder that has no tokenizer.json, if any."""
    if (hf_dir / "tokenizer.json").is_file():
        return None
    return next((hf_dir / name for name in SENTENCEPIECE if (hf_dir / name).is_file()), None)


def convert_sentencepiece(model: Path) -> bytes:
    """Convert a SentencePiece model with its config files using transformers; return the content of tokenizer.json.

    It encodes all probe texts like SentencePiece; a ValueError has the reason if the conversion fails.
    """
    try:
        import sentencepiece
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install transformers sentencepiece protobuf"
        raise ValueError(f"{error.name} is not installed; run: {hint}") from error
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast = AutoTokenizer.from_pretrained(model.parent, local_files_only=True, trust_remote_code=False)
            fast.save_pretrained(folder)
            content = (Path(folder) / "tokenizer.json").read_bytes()
        original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    except Exception as error:  # a damaged file can make transformers raise anything
        raise ValueError(one_line(error)[:200].rstrip(".")) from error
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False) != original.encode(text):
            raise ValueError(f"the converted tokenizer encodes {text!r} differently")
    return content
