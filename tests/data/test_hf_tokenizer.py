"""Ids of tokenizers of each kind, with each file beside tokenizer.json, against transformers' AutoTokenizer."""

import hashlib
import json
import shutil

import pytest
from helpers.cases import check_each
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from toolkit.data.chat.template import encode_text
from toolkit.data.sft.tokenize import cut_end
from toolkit.data.tokenizer import ENDS_FILE, Tokenizer
from toolkit.errors import UserError

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
PIECES = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "t", "h", "e", "\u2581t", "\u2581the", "th"]
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
TEXTS = (
    "a<tool>b",
    "the a",
    " a  <tool> \n b the ",
    "<x>a <y>b<z>",
    "the</s>a<s>b",
    "[PAD] a <image>xtool",
    "b <w> xtool a",
)


def byte_level():
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *BYTES, "th", "the"])}
    core = Core(models.BPE(vocab, [("t", "h"), ("th", "e")]))
    core.pre_tokenizer, core.decoder = BYTE_LEVEL, decoders.ByteLevel()
    return core


def metaspace():
    pieces = [*PIECES[:3], *(f"<0x{i:02X}>" for i in range(256)), *PIECES[3:]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("t", "h"), ("\u2581t", "he")][:2]
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.pre_tokenizer = METASPACE
    return core


def unigram():
    core = Core(models.Unigram([(piece, -float(i)) for i, piece in enumerate(PIECES)], 0, False))
    core.pre_tokenizer = METASPACE
    return core


def word_piece():
    pieces = ["<unk>", "<s>", "</s>", "a", "b", "the", "x", "##tool", "<", ">"]
    core = Core(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    return core


KINDS = {"byte-level": byte_level, "metaspace": metaspace, "unigram": unigram, "word piece": word_piece}


def template(core, single):
    tokens = [(token, core.token_to_id(token)) for token in ("<s>", "</s>") if token in single]
    return processors.TemplateProcessing(single, f"{single} $B", tokens)


PROCESSORS = {
    "none": lambda core: None,
    "trims": lambda core: processors.ByteLevel(trim_offsets=True),
    "bos": lambda core: template(core, "<s> $A"),
    "eos": lambda core: template(core, "$A </s>"),
    "both": lambda core: processors.Sequence([processors.ByteLevel(), template(core, "<s> $A </s>")]),
    "roberta": lambda core: processors.RobertaProcessing(
        *((token, core.token_to_id(token)) for token in ("</s>", "<s>"))
    ),
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
FLAGS = {"lstrip": True, "rstrip": True, "single_word": False, "normalized": False, "special": False}
TOOL = {"content": "<tool>", **FLAGS}
TYPE = {"__type": "AddedToken"}
PLAIN = {name: value for name, value in TOOL.items() if name != "special"}  # as older versions saved lists
SPECIAL = {"content": "<x>", **FLAGS, "rstrip": False, "special": True}


def decoder(*tokens, first=900):
    return {"added_tokens_decoder": {str(first + i): token for i, token in enumerate(tokens)}}


# tokenizer_config.json, special_tokens_map.json, added_tokens.json
FILES = {
    "decoder": (decoder(TOOL, SPECIAL), None, None),
    "decoder, in reverse": (decoder(TOOL, first=905) | {"pad_token": "[PAD]"}, {"pad_token": "<z>"}, {"<y>": 901}),
    "flags of a known token": (decoder(TOOL | {"content": "</s>"}, SPECIAL | {"content": "<s>"}), None, None),
    "single words": (decoder({"content": "tool", **FLAGS, "lstrip": False, "single_word": True}), None, None),
    "normalized": (decoder({"content": "THE", **FLAGS, "normalized": True}), None, None),
    "extra, a list": ({"extra_special_tokens": ["<x>", TOOL | TYPE]}, None, None),
    "extra, named": ({"extra_special_tokens": {"image_token": "<image>", "y_token": "<y>"}}, None, None),
    "additional": ({"additional_special_tokens": ["<tool>", "<x>", "<x>"], "pad_token": "[PAD]"}, None, None),
    "both lists": ({"extra_special_tokens": ["<y>"], "additional_special_tokens": ["<x>"]}, None, None),
    "named": ({"pad_token": "[PAD]", "unk_token": "<x>", "mask_token": SPECIAL | TYPE}, None, None),
    "a name of its own": ({"tool_token": "<tool>", "boi_token": "<image>"}, None, None),
    "map": ({}, {"pad_token": "[PAD]", "cls_token": {"content": "<tool>", **FLAGS}}, None),
    "map, lists": ({"extra_special_tokens": ["<y>"]}, {"extra_special_tokens": ["<x>", PLAIN]}, None),
    "map, additional": ({}, {"additional_special_tokens": ["<x>", "<tool>"]}, None),
    "map names another": ({}, {"eos_token": "<x>"}, None),
    "added_tokens.json": ({"pad_token": "[PAD]"}, None, {"<tool>": 990, "[PAD]": 980, "<y>": 985}),
    "all": ({"extra_special_tokens": ["<y>"]}, {"pad_token": "[PAD]"}, {"<tool>": 999, "<y>": 998}),
}  # fmt: skip
SETTINGS = [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}]
CLASSES = {
    "unigram": ("PreTrainedTokenizerFast",),
    "byte-level": ("PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "GPTNeoXTokenizerFast"),
    "metaspace": ("PreTrainedTokenizerFast", "LlamaTokenizer", "CodeLlamaTokenizerFast"),
}


# Tokens that transformers adds for the class itself.
OF_CLASSES = {
    "CodeLlamaTokenizerFast": [*(f"\u2581<{name}>" for name in ("PRE", "MID", "SUF", "EOT")), "<FILL_ME>"],
    "GPTNeoXTokenizerFast": ["<|endoftext|>", "<|padding|>"],
    "GPT2Tokenizer": ["<|endoftext|>"],
}


def write(folder, core, config, special_map=None, added=None, processor=None):
    core.add_special_tokens(["<s>", "</s>"])
    if processor is not None:
        core.post_processor = processor
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | NAMED | config
    for name, content in (("tokenizer_config", config), ("special_tokens_map", special_map), ("added_tokens", added)):
        (folder / f"{name}.json").unlink(missing_ok=True)
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))


def assert_equal(tokenizer, folder):
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.vocabulary == hf.get_vocab()
    assert (tokenizer.bos_id, tokenizer.eos_id) == (hf.bos_token_id, hf.eos_token_id)
    for text in TEXTS:
        assert tokenizer.encode_with_offsets(text)[0] == hf(text, add_special_tokens=False)["input_ids"], text
    for text in ("a b", "the"):
        assert tokenizer.encode(text, eos=None) == hf(text)["input_ids"], text


def thin(cases, step):
    """Return a part of the cases with each value, and all of them, which are slow."""
    return [pytest.param(cases[::step], id="part"), pytest.param(cases, id="all", marks=pytest.mark.slow)]


def check_folder(folder, tmp_path, **options):
    """Our ids are transformers', and stay so in a checkpoint's folder and in an export from it."""
    tokenizer = Tokenizer.load(folder, **options)
    assert_equal(tokenizer, folder)
    check_copies(tokenizer, tmp_path)


def check_copies(tokenizer, tmp_path):
    checkpoint, export = tmp_path / "checkpoint", tmp_path / "export"
    for copy in (checkpoint, export):
        shutil.rmtree(copy, ignore_errors=True)
    tokenizer.save(checkpoint)
    saved = Tokenizer.load(checkpoint, is_own=True)
    assert saved.fingerprint == tokenizer.fingerprint
    assert saved.encode("the", eos=None) == tokenizer.encode("the", eos=None)
    saved.save(export, for_transformers=True)
    assert not (export / ENDS_FILE).exists()
    assert_equal(tokenizer, export)
    assert Tokenizer.load(export).encode("the", eos=None) == tokenizer.encode("the", eos=None)


FILE_CASES = [(kind, name) for kind in KINDS for name in FILES]


@pytest.mark.parametrize("cases", thin(FILE_CASES, 3))
def test_tokens_of_other_files_have_the_ids_of_transformers(cases, tmp_path):
    def check(kind, name):
        write(tmp_path, KINDS[kind](), *FILES[name])
        check_folder(tmp_path, tmp_path)

    check_each(check, cases)


END_CASES = [
    (kind, name, setting, tokenizer_class)
    for kind in KINDS
    for tokenizer_class in CLASSES.get(kind, CLASSES["unigram"])
    for name in PROCESSORS
    for setting in SETTINGS
]


@pytest.mark.parametrize("cases", thin(END_CASES, 5))
def test_the_post_processor_decides_what_begins_and_ends_a_text(cases, tmp_path):
    """Each disagreement with a setting is one line."""

    def check(kind, processor, setting, tokenizer_class):
        core, lines = KINDS[kind](), []
        core.add_special_tokens(["<s>", "</s>"])
        core.add_special_tokens(OF_CLASSES.get(tokenizer_class, []))
        write(tmp_path, core, setting | {"tokenizer_class": tokenizer_class}, processor=PROCESSORS[processor](core))
        check_folder(tmp_path, tmp_path, report=lines.append)
        tokenizer = Tokenizer.load(tmp_path)
        ids = tokenizer.encode("the", eos=None)
        expected = [
            f"--tokenizer_dir {tmp_path}: tokenizer_config.json has add_{name}_token {str(value).lower()}, but "
            f"tokenizer.json adds {'none' if value else 'one'}: texts have {'no' if value else 'a'} {name} token, "
            "as in transformers 5"
            for name, id_ in (("bos", tokenizer.bos_id), ("eos", tokenizer.eos_id))
            if (value := setting.get(f"add_{name}_token")) not in (None, id_ in ids)
        ]
        assert lines == expected

    check_each(check, cases)


def test_a_checkpoint_without_a_decision_keeps_the_old_rule_and_its_key(tmp_path):
    """tokenizer.json alone, bos by setting: an older version wrote it. Its export gives transformers these ids."""

    def check(kind, processor, setting, name, tokenizer_class):
        core = KINDS[kind]()
        core.add_special_tokens(["<s>", "</s>"])
        config, *other = FILES[name]
        config = config | setting | {"tokenizer_class": tokenizer_class}
        write(tmp_path, core, config, *other, processor=PROCESSORS[processor](core))
        (tmp_path / "model_config.yaml").touch()
        content, tokenizer = (tmp_path / "tokenizer.json").read_bytes(), Tokenizer.load(tmp_path)
        assert tokenizer.vocabulary == core.get_vocab()
        bos = setting.get(
            "add_bos_token", PROCESSORS[processor](core) is not None and processor not in ("trims", "eos")
        )
        text = core.encode("the", add_special_tokens=False).ids
        assert tokenizer.encode("the", eos=None) == [*[core.token_to_id("<s>")] * bos, *text]
        ids = [core.token_to_id(config.get(name, NAMED[name])) for name in NAMED]
        assert tokenizer.fingerprint == hashlib.sha256(content + f"{ids[0]} {ids[1]}".encode()).hexdigest()
        check_copies(tokenizer, tmp_path)
        assert not (tmp_path / "checkpoint" / ENDS_FILE).exists()

    cases = [("metaspace", "bos", setting, name, "LlamaTokenizer") for setting in SETTINGS for name in ("map", "all")]
    cases += [("byte-level", processor, SETTINGS[1], "decoder", "PreTrainedTokenizerFast") for processor in PROCESSORS]
    cases += [("byte-level", "both", SETTINGS[2], name, "PreTrainedTokenizerFast") for name in FILES]
    cases += [("byte-level", "bos", SETTINGS[1], "extra, named", "GPTNeoXTokenizer")]
    check_each(check, cases)


def test_a_text_that_is_cut_keeps_its_end(tmp_path):
    from transformers import AutoTokenizer

    def check(processor, limit):
        core = byte_level()
        core.add_special_tokens(["<s>", "</s>"])
        write(tmp_path, core, {}, processor=PROCESSORS[processor](core))
        tokenizer, hf = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
        encoding = encode_text(tokenizer, "a b the", eos=None)
        ids = cut_end(encoding, limit, tokenizer).ids
        assert ids == hf("a b the", truncation=True, max_length=limit)["input_ids"]

    check_each(check, [(processor, limit) for processor in PROCESSORS for limit in (3, 4, 9)])


def test_a_token_of_settings_that_an_old_checkpoint_lacks_is_named(tmp_path):
    core = byte_level()
    write(tmp_path, core, {"eos_token": "<end>", "bos_token": None}, {"bos_token": "<begin>"})
    (tmp_path / "model_config.yaml").touch()
    tokenizer = Tokenizer.load(tmp_path)
    for request, file, token in (
        ("eos", "tokenizer_config.json", "<end>"),
        ("bos", "special_tokens_map.json", "<begin>"),
    ):
        with pytest.raises(UserError) as error:
            tokenizer.encode("a", **{request: True})
        hint = f"{file} names {token}, which tokenizer.json lacks: add it there"
        assert str(error.value).endswith(f"the tokenizer has no {request} token; {hint}")
    (tmp_path / "model_config.yaml").unlink()
    added = Tokenizer.load(tmp_path)
    assert added.eos_id == core.get_vocab_size() + 1 and added.encode("a<end>", bos=False)[-1] == added.eos_id


@pytest.mark.parametrize("ends", [{"before": "<s>"}, {"after": [999]}, {"before": [-1]}, {"after": [True]}])
def test_ends_that_are_no_tokens_are_an_error_in_one_line(ends, tmp_path):
    write(tmp_path, byte_level(), {})
    (tmp_path / ENDS_FILE).write_text(json.dumps(ends))
    with pytest.raises(UserError, match=f"{ENDS_FILE}: .* must be a list of token ids"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [{"added_tokens_decoder": 3}, {"added_tokens_decoder": {"x": TOOL}},
                                    decoder({"text": "<x>"}), {"extra_special_tokens": [3]}])  # fmt: skip
def test_tokens_that_cannot_be_read_are_an_error_in_one_line(config, tmp_path):
    write(tmp_path, byte_level(), config)
    with pytest.raises(UserError, match="tokenizer_config.json, .*: a token cannot be read") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)
