"""tutorials/extend_points.md: its command, importer, dialect and exporter, as they are written."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import toolkit
from toolkit import extension
from toolkit.checkpoints.weights import save_weights
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.commands import all_commands
from toolkit.models.gpt import GPT

INSTALLED = extension._installed  # before conftest.py replaces it
PAGE = (Path(__file__).parents[1] / "tutorials" / "extend_points.md").read_text()


@pytest.fixture
def acme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the extension adds this folder
    monkeypatch.setattr(extension, "_module_extensions", {})
    files = ("counting_words.py", "acme.py", "acme_formats.py", "acme_numpy.py")
    for name, block in zip(files, re.findall(r"```python\n(.*?)```", PAGE, re.S), strict=True):
        Path(name).write_text(block)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    extension.add_extensions(["acme"])


def test_command_of_the_page(acme, monkeypatch, capsys, request):
    """In an installed package."""
    all_commands.cache_clear()
    request.addfinalizer(all_commands.cache_clear)
    Path("words-1.0.dist-info").mkdir()
    Path("words-1.0.dist-info/METADATA").write_text("Name: words\nVersion: 1.0\n")
    Path("words-1.0.dist-info/entry_points.txt").write_text("[toolkit.extensions]\nwords = counting_words\n")
    monkeypatch.syspath_prepend(Path.cwd())
    monkeypatch.setattr(extension, "_installed", INSTALLED.__wrapped__)
    Path("notes.txt").write_text("a few words of text")
    assert main(["count_words", "notes.txt", "--minimum", "3"]) == 0 and capsys.readouterr().out == "3\n"


def test_importer_and_exporter_of_the_page(acme):
    config = toolkit.ModelConfig(vocab_size=300, block_size=16, n_layer=1, n_embd=16, n_head=2)
    model = GPT(config)
    Path("m").mkdir()
    save_weights({f"net.{name}": weight for name, weight in model.state_dict().items()}, Path("m/lit_model.pth"))
    values = {"tool": "acme", "words": 300, "length": 16, "layers": 1, "width": 16, "heads": 2}
    Path("m/model_config.yaml").write_text(json.dumps(values))
    loaded = toolkit.load("m")
    assert loaded.config == config
    importlib.import_module("acme_numpy").setup("m", "m.npz")
    exported = np.load("m.npz")
    assert exported.files == [name for name, _ in model.named_parameters()]
    for name, weight in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight) and np.array_equal(exported[name], weight.detach())


def test_dialect_of_the_page(acme, refusal):
    Path("acme.yaml").write_text("acme: {rate: 0.5, rows: 12}\nseed: 3")
    options = parse("pretrain", ["--config", "acme.yaml", "--train.global_batch_size", "8"])["options"]
    assert (options.train.learning_rate, options.train.global_batch_size, options.shared.seed) == (0.5, 8, 3)
    assert toolkit.Trainer("pico-llama", rate=0.25).arguments()["train"] == {"learning_rate": 0.25}
    for text, message in (
        ("{rat: 1}", "acme.yaml: acme.rat: no such key; did you mean 'rate'"),
        ("{rate: -1}", "must be greater than zero; it is set by acme.yaml: acme.rate"),
    ):
        Path("acme.yaml").write_text(f"acme: {text}")
        assert message in refusal("pretrain", "pico-llama", "--config", "acme.yaml")
