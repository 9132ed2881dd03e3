"""Convert a Hugging Face folder's SentencePiece tokenizer to tokenizer.json."""

import tempfile
import warnings
from pathlib import Path

from toolkit.errors import one_line

# File names that transformers looks for. FILE_PATTERNS (the files to download) must include all of them.
SENTENCEPIECE = ("tokenizer.model", "spiece.model")
# Texts that both tokenizers must encode identically: spaces, other scripts, unknown characters, line ends, digits. No
# leading space, which transformers encodes differently.
_PROBES = ("Hello world", "two  spaces ", "Grüße, 你好, مرحبا 🎉", "a\nb\n\n\tc", "1234567.89 + x_i == y", "")


def convert_sentencepiece(model: Path) -> bytes:
    """Convert a SentencePiece model with transformers. Return the content of tokenizer.json.

    Raises ValueError if the conversion fails or a probe text is not encoded as by SentencePiece.
    """
    try:
        import sentencepiece
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = "pip install transformers sentencepiece protobuf"
        raise ValueError(f"{error.name} is not installed; run: {hint}") from error
    try:
        original = sentencepiece.SentencePieceProcessor(model_file=str(model))  # transformers would log a damaged one
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast = AutoTokenizer.from_pretrained(model.parent, local_files_only=True, trust_remote_code=False)
            fast.save_pretrained(folder)
            content = (Path(folder) / "tokenizer.json").read_bytes()
    except Exception as error:  # a damaged file can make transformers raise anything
        raise ValueError(one_line(error)[:200].rstrip(".")) from error
    for text in _PROBES:
        if fast.encode(text, add_special_tokens=False) != original.encode(text):
            raise ValueError(f"the converted tokenizer encodes {text!r} differently")
    return content
