from types import SimpleNamespace

import pytest

from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.inference.text import TextStream, stop_tokens

TEXTS = [
    "plain text",
    "naïve café, 東京 and 🎉🎉 done",
    "👩\u200d👩\u200d👧 ends on a family 👩\u200d👧",
    "a\n\n  b\ttab",
]


@pytest.fixture(scope="module")
def tokenizer():
    """A byte-level tokenizer: every non-ASCII character is several tokens."""
    return train_bpe(["abc"], vocab_size=257)


def stream_pieces(tokenizer, ids, context=()):
    stream = TextStream(tokenizer, list(context))
    pieces = [stream.push(i) for i in ids]
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_stream_concatenates_to_the_text_with_intact_characters(tokenizer, text):
    pieces = stream_pieces(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_is_emitted_as_soon_as_complete(tokenizer):
    assert stream_pieces(tokenizer, tokenizer.encode("aé東b")) == ["a", "", "é", "", "", "東", "b", ""]


def test_incomplete_bytes_are_emitted_at_the_end(tokenizer):
    ids = tokenizer.encode("a東")[:-1]  # the last byte is missing
    assert "".join(stream_pieces(tokenizer, ids)) == "a\ufffd"
    ids = [*ids, *tokenizer.encode("b")]
    assert "".join(stream_pieces(tokenizer, ids)) == "a\ufffdb"


def test_context_is_not_emitted_even_if_cut_inside_a_character(tokenizer):
    context = tokenizer.encode("東京" * 5)
    assert "".join(stream_pieces(tokenizer, tokenizer.encode("é!"), context)) == "é!"


def test_space_after_the_prompt_is_kept():
    """SentencePiece-like decoders drop the space before the first token, and only there."""
    words = ["\u2581The", "\u2581quick", "\u2581fox"]
    decoder = SimpleNamespace(decode=lambda ids: "".join(words[i] for i in ids).replace("\u2581", " ")[1:])
    assert stream_pieces(decoder, [1, 2], context=[0]) == [" quick", " fox", ""]


def test_special_tokens_are_not_emitted(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.eos_id, *tokenizer.encode("b")]
    assert "".join(stream_pieces(tokenizer, ids)) == "ab"


def with_settings(content, eos_id=7):
    return SimpleNamespace(eos_id=eos_id, name="it", settings=lambda file: content, files={})


@pytest.mark.parametrize(
    ("content", "expected"),
    [({}, [7]), ({"eos_token_id": None}, [7]), ({"eos_token_id": 3}, [3]), ({"eos_token_id": [3, 5]}, [3, 5])],
)
def test_stop_tokens(content, expected):
    assert stop_tokens(with_settings(content)) == expected


def test_no_stop_tokens():
    assert stop_tokens(with_settings({}, eos_id=None)) == []
    for broken in ("x", {}, ["x"], True, -1):
        with pytest.raises(UserError, match="it: generation_config.json: eos_token_id"):
            stop_tokens(with_settings({"eos_token_id": broken}))
