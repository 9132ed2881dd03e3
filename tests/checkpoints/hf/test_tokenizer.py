"""Folders whose tokenizer is a SentencePiece model alone: it is converted, or a warning has the reason."""

import builtins
import json
import logging
import runpy
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from toolkit.checkpoints.hf import import_hf as import_module
from toolkit.checkpoints.hf.import_hf import SENTENCEPIECE, import_hf
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer

spm, transformers = pytest.importorskip("sentencepiece"), pytest.importorskip("transformers")


def small(vocab_size: int) -> "transformers.LlamaConfig":
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaConfig(**sizes, vocab_size=vocab_size)


@pytest.fixture
def folder(tmp_path, corpus) -> Path:
    """A random Llama with a tokenizer.model, as the first Llamas were published."""
    transformers.AutoModelForCausalLM.from_config(small(vocab_size=400)).save_pretrained(tmp_path / "hf")
    text = tmp_path / "text.txt"
    text.write_text(
        "\n".join([file.read_text() for file in sorted(corpus.iterdir())] + [f"{i} × {i}" for i in range(99)])
    )
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "hf" / "tokenizer"), vocab_size=300, model_type="bpe",
        byte_fallback=True, unk_id=0, bos_id=1, eos_id=2, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=False,
    )  # fmt: skip
    (tmp_path / "hf" / "tokenizer.vocab").unlink()
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(names))
    return tmp_path / "hf"


def test_sentencepiece_is_converted_and_encodes_identically(folder, tmp_path):
    notes = import_hf(folder, tmp_path / "native")
    assert any("converted tokenizer.model to tokenizer.json" in note for note in notes), notes
    native = Tokenizer.load(tmp_path / "native")
    reference = spm.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    for text in ("the model reads", "a  b\n", "99 × 99", "neue Wörter 🎉"):
        ids = native.encode(text, bos=False)
        assert ids == reference.encode(text) and native.decode(ids).strip() == text.strip()
    assert (native.bos_id, native.eos_id) == (1, 2)
    assert (tmp_path / "native" / "tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    assert not (folder / "tokenizer.json").exists()


def test_a_download_fetches_what_a_conversion_reads():
    assert all(any(fnmatch(name, pattern) for pattern in FILE_PATTERNS) for name in SENTENCEPIECE)


def test_warns_about_more_tokens_than_embeddings(folder, tmp_path):
    transformers.AutoModelForCausalLM.from_config(small(vocab_size=260)).save_pretrained(folder)
    made, larger = import_hf(folder, tmp_path / "native")
    assert "converted tokenizer.model to tokenizer.json" in made
    assert larger.startswith("warning: the tokenizer has 300 tokens, but the model embeds only 260; ")


def test_convert_script_keeps_the_tokenizer(folder, monkeypatch, capsys):
    script = Path(__file__).parents[3] / "scripts" / "convert_hf_checkpoint.py"
    for options, written in (["--print_config"], set()), ([], {"tokenizer.json", "lit_model.pth", "model_config.yaml"}):
        before = {path.name for path in folder.iterdir()}
        monkeypatch.setattr(sys, "argv", [str(script), "--checkpoint_dir", str(folder), *options])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        assert end.value.code == 0 and {path.name for path in folder.iterdir()} == before | written
        shown = capsys.readouterr().out
        assert "dtype: null" in shown if options else shown.endswith(f"model_config.yaml into {folder}\n")
    assert Tokenizer.load(folder).vocab_size == 300


def test_damaged_tokenizer_is_one_note_and_weights_are_imported(folder, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (folder / "tokenizer.model").write_bytes(b"nothing of the kind")
    (note,) = import_hf(folder, tmp_path / "native")
    assert not caplog.records
    assert "holds no tokenizer.json, and tokenizer.model was not converted: " in note and "\n" not in note
    assert note.endswith("; or copy a tokenizer.json and its companion files into that folder")
    assert (tmp_path / "native" / "lit_model.pth").exists() and not (tmp_path / "native" / "tokenizer.json").exists()


def test_tokenizer_with_different_encoding_is_rejected(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module, "_PROBES", ("<s> in a text",))  # transformers takes it for the token
    (note,) = import_hf(folder, tmp_path / "native")
    assert "encodes '<s> in a text' differently" in note


def test_missing_sentencepiece_names_the_packages(folder, tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "sentencepiece":
            raise ImportError(name="sentencepiece")
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    (note,) = import_hf(folder, tmp_path / "native")
    assert "sentencepiece is not installed; run: pip install transformers sentencepiece protobuf" in note
