"""A tokenizer with more tokens than the model embeds: what the model knows works, the rest is one line and exit 2."""

import io
import sys
from types import SimpleNamespace

import pytest
import torch
from toolkit_metric.tasks import load_lm

from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

KNOWN, UNKNOWN = "x", "word word"  # a byte is known, the model's tokens are one and all bytes
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = ModelConfig(
        name="small", block_size=64, vocab_size=256 + 1, padded_vocab_size=256 + 1, n_layer=1, n_embd=32, n_head=2
    )
    tokenizer = train_bpe([UNKNOWN * 20], vocab_size=256 + 10).with_files({"chat_template.jinja": TEMPLATE.encode()})
    assert max(tokenizer.encode(UNKNOWN)) >= config.padded_vocab_size > max(tokenizer.encode(KNOWN))
    folder = tmp_path_factory.mktemp("models") / "m"
    folder.mkdir()
    state = GPT(config).state_dict()
    write_model_files(folder, state_dict=state, config=config, hyperparameters=None, tokenizer=tokenizer)
    return folder


def run(monkeypatch, capsys, *argv: str) -> tuple[int, str]:
    """Return the exit code and the output without statistics and notes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code = main([*argv, "--accelerator", "cpu"])
    return code, "".join(line for line in capsys.readouterr().err.splitlines() if line.startswith("toolkit "))


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_prompts(folder, monkeypatch, capsys, command):
    options = [command, str(folder), "--max_new_tokens", "3", "--prompt"]
    assert run(monkeypatch, capsys, *options, KNOWN) == (0, "")
    code, output = run(monkeypatch, capsys, *options, UNKNOWN)
    assert code == 2
    assert output.startswith(f"toolkit {command}: checkpoint_dir {folder}: encodes this text with token 2")
    assert output.endswith("the model has embeddings only for 0 to 256; use the model's own tokenizer")


@pytest.mark.parametrize("tokenizer_dir", [False, True])
def test_text_to_evaluate(folder, monkeypatch, capsys, tmp_path, tokenizer_dir):
    command = [
        "evaluate",
        str(folder),
        "--max_seq_length",
        "16",
        "--data",
        "TextFiles",
        "--split",
        "train",
        "--data.val_fraction",
        "0",
    ]
    command += ["--tokenizer_dir", str(folder)] if tokenizer_dir else []
    for text, expected in ((KNOWN, 0), (UNKNOWN, 2)):
        (tmp_path / f"{text}.txt").write_text(text * 40)
        code, output = run(monkeypatch, capsys, *command, "--data.train_data_path", str(tmp_path / f"{text}.txt"))
        assert code == expected, output
    flag = "--tokenizer_dir" if tokenizer_dir else "checkpoint_dir"
    assert output.startswith(f"toolkit evaluate: {flag} {folder}: encodes this text with token 2")


def test_tasks(folder, tmp_path):
    pytest.importorskip("lm_eval")
    export_hf(folder, tmp_path / "hf")
    options = {"max_length": None, "batch_size": 1, "device": torch.device("cpu"), "precision": "32-true"}
    lm = load_lm(tmp_path / "hf", tasks="t", tokenizer_dir=None, tokenizer_name="checkpoint_dir m", **options)
    ((score, _),) = lm.loglikelihood([SimpleNamespace(args=(KNOWN, KNOWN))])
    assert score < 0
    with pytest.raises(UserError, match="checkpoint_dir m: encodes this text with token 2.., but the model has"):
        lm.loglikelihood([SimpleNamespace(args=(UNKNOWN, KNOWN))])
