import json
import shutil

import pytest

from toolkit.data.tokenizer import Tokenizer, collect_characters, train_bpe
from toolkit.data.tokenizer_limits import translate_panic
from toolkit.errors import UserError

TEXTS = [
    "def f(x):\n    return x + 1\n\n\nclass Größe:\n\tpass  # naïve 你好 🙂\r\n",
    "",
    " leading space, trailing space ",
    "two\n\nblank <|endoftext|> lines and a special token",
    "\x00\x7f\u200b control",
]


@pytest.fixture(scope="module")
def trained(corpus):
    return train_bpe([p.read_text() for p in sorted(corpus.iterdir())] + TEXTS, 400)


def test_trained_tokenizer_equals_transformers(trained, tmp_path):
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    assert len(hf) == trained.vocab_size
    assert (hf.eos_token_id, hf.bos_token_id) == (trained.eos_id, trained.bos_id) == (0, 0)
    for text in TEXTS:
        assert hf(text)["input_ids"] == trained.encode(text)
        assert hf.decode(trained.encode(text)) == trained.decode(trained.encode(text), skip_special_tokens=False)


def test_character_tokenizer_equals_transformers(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = collect_characters(["to be\n", "日本 é"])
    assert tokenizer.encode("\nbe 日") == [2, 4, 5, 3, 9] and tokenizer.encode("X") == [1]  # after the special tokens
    tokenizer.save(tmp_path)
    text = "to é\nbe 日<|endoftext|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text.removesuffix("<|endoftext|>")


def test_loaded_tokenizer_equals_transformers(sentencepiece_dir):
    from transformers import AutoTokenizer

    tokenizer, hf = Tokenizer.load(sentencepiece_dir), AutoTokenizer.from_pretrained(sentencepiece_dir)
    for text in [*TEXTS, "the cat </s> the"]:
        assert tokenizer.encode(text) == hf(text)["input_ids"]
        assert tokenizer.encode(text, bos=False) == hf(text, add_special_tokens=False)["input_ids"]


def test_trained_tokenizer_round_trips_and_reloads(trained, tmp_path):
    trained.save(tmp_path / "new")
    loaded = Tokenizer.load(tmp_path / "new")
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode_batch(TEXTS) == trained.encode_batch(TEXTS) == [trained.encode(t) for t in TEXTS]
    text = TEXTS[0]
    assert loaded.decode(loaded.encode(text, eos=True)) == text
    assert loaded.encode(text, bos=True, eos=True) == [0, *loaded.encode(text), 0]


def test_training_is_deterministic(trained, corpus):
    again = train_bpe([p.read_text() for p in sorted(corpus.iterdir())] + TEXTS, 400)
    other = train_bpe([p.read_text() for p in sorted(corpus.iterdir())], 300)
    assert again.fingerprint == trained.fingerprint != other.fingerprint


def test_token_bytes_sum_to_the_bytes_of_the_text(trained):
    sizes = trained.token_bytes()
    assert sizes.shape == (trained.vocab_size,) and sizes.dtype == "int64"
    for text in TEXTS:
        expected = len(text.replace("<|endoftext|>", "").encode())
        assert sizes[trained.encode(text, eos=True)].sum() == expected


def test_token_bytes_of_a_sentencepiece_like_tokenizer(sentencepiece_dir):
    tokenizer = Tokenizer.load(sentencepiece_dir)
    sizes = tokenizer.token_bytes()
    for text in ("the cat", "größe 你", "a"):
        assert sizes[tokenizer.encode(text, eos=True)].sum() == len(text.encode()) + 1  # the leading space


def test_added_tokens_count_unless_special(trained, tmp_path):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Core

    trained.save(tmp_path)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.add_tokens([AddedToken("größe", special=False)])
    core.add_special_tokens(["<|tool|>"])
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == trained.vocab_size + 2
    assert tokenizer.token_bytes()[-2:].tolist() == [len("größe".encode()), 0]


def test_saving_copies_every_tokenizer_file_even_if_the_folder_was_removed(sentencepiece_dir, tmp_path):
    source = shutil.copytree(sentencepiece_dir, tmp_path / "source")
    tokenizer = Tokenizer.load(source)
    expected = {p.name: p.read_bytes() for p in source.iterdir() if p.name != "model.safetensors"}
    shutil.rmtree(source)  # for example, keep_last removed the checkpoint
    tokenizer.save(tmp_path / "copy")
    assert {p.name: p.read_bytes() for p in (tmp_path / "copy").iterdir()} == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>"}, 2),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>"}}, 2),
        ("special_tokens_map.json", {"eos_token": {"content": "<s>"}}, 1),
        ("generation_config.json", {"eos_token_id": [7, 8]}, 7),
        ("generation_config.json", {"eos_token_id": 10**6}, None),
        ("tokenizer_config.json", {"eos_token": "<missing>"}, 268),  # added, as transformers does
    ],
)
def test_end_of_document_token_is_found(sentencepiece_dir, tmp_path, name, content, expected):
    shutil.copy(sentencepiece_dir / "tokenizer.json", tmp_path)
    assert Tokenizer.load(tmp_path / "tokenizer.json").eos_id == 2  # a common name, without a config
    (tmp_path / name).write_text(json.dumps(content))
    assert Tokenizer.load(tmp_path).eos_id == expected


def test_truncation_and_padding_are_disabled(trained, tmp_path):
    from tokenizers import Tokenizer as Core

    trained.save(tmp_path)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.enable_truncation(4)
    core.enable_padding(length=64)
    core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == trained.encode(TEXTS[0])


def test_offsets_cover_the_text_even_if_the_tokenizer_trims_them(trained, tmp_path):
    from tokenizers import Tokenizer as Core
    from tokenizers import processors

    trained.save(tmp_path)
    core = Core.from_file(str(tmp_path / "tokenizer.json"))
    core.post_processor = processors.ByteLevel(trim_offsets=True)
    core.save(str(tmp_path / "tokenizer.json"))
    text = " the  model\n  reads<|endoftext|> a "
    ids, offsets = Tokenizer.load(tmp_path).encode_with_offsets(text)
    assert ids == trained.encode(text)
    assert [text[start:end] for start, end in offsets] == [trained.decode([i], skip_special_tokens=False) for i in ids]


def test_splits_at_newlines_only_if_ids_are_unchanged(trained, sentencepiece_dir):
    assert trained.splits_at_newlines()
    assert not Tokenizer.load(sentencepiece_dir).splits_at_newlines()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "no such folder"),
        ({}, "contains no tokenizer.json"),
        ({"tokenizer.model": b"x"}, "contains no tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b""}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json cannot be read"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{"}, "tokenizer_config.json is not valid JSON"),
        ({"tokenizer.json": b"{}", "generation_config.json": b"[]"}, "generation_config.json must contain"),
    ],
)
def test_missing_or_invalid_tokenizer_raises_a_one_line_error(tmp_path, files, message):
    folder = tmp_path / "tok"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        Tokenizer.load(folder)
    assert str(error.value).startswith(f"--tokenizer_dir {folder}: ") and "\n" not in str(error.value)


def test_requesting_a_missing_special_token_is_an_error(trained, tmp_path):
    trained.save(tmp_path)
    for name in ("special_tokens_map.json", "generation_config.json"):
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("x") == trained.encode("x")
    for request in ({"bos": True}, {"eos": True}):
        with pytest.raises(UserError, match=next(iter(request))):
            tokenizer.encode("x", **request)


def test_multi_line_reasons_are_joined_to_one_line(trained, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("one\n  two")

    trained.save(tmp_path)
    monkeypatch.setattr("tokenizers.Tokenizer.from_str", fail)
    with pytest.raises(UserError, match="cannot be read: one two$"):
        Tokenizer.load(tmp_path)


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def changed(tokenizer, **parts):
    raw = json.loads(tokenizer.files["tokenizer.json"]) | parts
    return {"tokenizer.json": json.dumps(raw).encode()}


def sequence(*steps, name="normalizers"):
    return {"type": "Sequence", name: list(steps)}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
BOMBS = {
    "doubling": {"normalizer": sequence(*[replace("a", "aa")] * 40)},
    "by two characters": {"normalizer": sequence(*[replace("ab", "abab")] * 40)},
    "in turn": {"normalizer": sequence(*[replace("a", "bb"), replace("b", "aa")] * 20)},
    "ahead": {"normalizer": sequence(*[replace("a(?=.*z)", "aa", "Regex")] * 40)},
    "between": {"normalizer": sequence(*[replace("(?=a)", "a", "Regex")] * 40)},
    "empty": {"normalizer": sequence(*[replace("", "a")] * 40)},
    "at once": {"normalizer": replace("a", "a" * 10**6)},
    "nested": {"normalizer": sequence(sequence(*[replace("a", "aa")] * 20), sequence(*[replace("a", "aa")] * 20))},
    "decoder": {"decoder": sequence(*[replace("a", "aa")] * 40, name="decoders")},
}


@pytest.mark.parametrize("name", BOMBS)
def test_unbounded_text_growth_is_an_error(trained, tmp_path, name):
    (tmp_path / "tokenizer.json").write_bytes(changed(trained, **BOMBS[name])["tokenizer.json"])
    with pytest.raises(
        UserError, match="tokenizer.json: its (normalizer|decoder) can make a text .* times as long"
    ) as e:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(e.value)


def test_steps_of_common_tokenizers_are_accepted(trained):
    escapes = [replace(chr(ord("!") + i), f"\u4e00{i}\u4e01") for i in range(5)]
    escapes += [replace(" " * i, f"<blank_{i}>") for i in range(80, 1, -1)]
    spaces = [replace(" {2,}", " ", "Regex"), replace("\\s+$", "", "Regex"), replace("\n", " \n ", "Regex")]
    letters = [{"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Strip", "strip_left": True, "strip_right": True}]
    sentencepiece = [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")]
    for steps in (escapes, letters + spaces, sentencepiece, [replace("``", '"'), replace("''", '"'), *letters]):
        Tokenizer(changed(trained, normalizer=sequence(*steps)), "usual").encode("a  b\n!")


def test_library_panic_raises_a_one_line_error(trained):
    split = {"type": "Split", "pattern": {"Regex": "(a|a)*b|(a+)+c"}, "behavior": "Isolated", "invert": False}
    tokenizer = Tokenizer(changed(trained, pre_tokenizer=sequence(split, BYTE_LEVEL, name="pretokenizers")), "mine")
    text = "a" * 40 + "d"
    for encode in (tokenizer.encode, tokenizer.encode_with_offsets, lambda text: tokenizer.encode_batch([text] * 4)):
        with pytest.raises(UserError, match="^mine: tokenizer.json: .*retry-limit-in-match") as error:
            encode(text)
        assert "\n" not in str(error.value)
    assert tokenizer.encode("ab")
    with pytest.raises(KeyboardInterrupt), translate_panic("mine"):
        raise KeyboardInterrupt
