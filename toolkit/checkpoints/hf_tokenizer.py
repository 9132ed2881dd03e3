"""Tokenizers of SentencePiece, which Hugging Face folders may hold instead of a tokenizer.json."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

# The names that transformers' classes look for; all of them must be among what downloads fetch (FILE_PATTERNS).
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
# What the two must encode alike: spaces, other scripts, what no vocabulary has, line ends, digits. No space in front:
# there transformers, and so everybody who uses the model with it, differs from SentencePiece.
_PROBES = ("Hello world", "two  spaces ", "Grüße, 你好, مرحبا 🎉", "a\nb\n\n\tc", "1234567.89 + x_i == y", "")


def lone_sentencepiece(hf_dir: Path) -> Path | None:
    """The SentencePiece model of a folder without a tokenizer.json; None where there is none, or no need."""
    if (hf_dir / "tokenizer.json").is_file():
        return None
    return next((hf_dir / name for name in SENTENCEPIECE if (hf_dir / name).is_file()), None)


def converted(model: Path) -> bytes:
    """Make a tokenizer.json of a SentencePiece model beside its config files, with transformers.

    Returns:
        The content of the file, which encodes what is tried as SentencePiece does.

    Raises:
        ValueError: it cannot be made, for the reason given.
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
    except Exception as error:  # transformers and a broken file can make anything of it
        raise ValueError(" ".join(str(error).split())[:200].rstrip(".")) from error
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False) != original.encode(text):
            raise ValueError(f"what transformers makes of it encodes {text!r} in another way")
    return content
