"""Shared fixtures of the data tests."""

import json

import pytest
from helpers.byte_tokenizer import plain, tokenizer  # noqa: F401 - fixtures


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory):
    """A small tokenizer like Llama 2's: leading space, byte fallback, bos."""
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers, processors

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["\u2581", "t", "h", "e", "a", "\u2581t", "\u2581th", "\u2581the", "\u2581a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("\u2581", "a")]
    core = Core(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("sentencepiece")
    core.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.model").write_bytes(b"not read")
    (folder / "model.safetensors").write_bytes(b"not a tokenizer file")
    return folder
