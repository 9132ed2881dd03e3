"""Fixtures of all tests: surroundings that are the same on every machine (helpers/surroundings.py), a small corpus."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
from helpers.corpus import WORDS
from helpers.surroundings import (
    Folders,
    SlowCollections,
    default_signals,
    freeze_objects,
    replace_environment,
    set_cpu,
    set_environment,
    short_outputs,
)

set_environment()  # before torch and others are imported, which read it

default_signals()

_collections = SlowCollections()

# Workers take one file after another: expensive ones first, so that cheap ones fill the end of the run.
FIRST = [
    "distributed",
    "doctor",
    "plan",
    "training",
    "test_api.py",
    "test_tutorials.py",
    "checkpoints",
    "models",
    "planning",
    "inference",
]


def pytest_collection_modifyitems(items):
    @cache
    def place(path: Path) -> int:
        names = path.relative_to(Path(__file__).parent).parts
        return next((i for i, name in enumerate(FIRST) if name in names), len(FIRST))

    items.sort(key=lambda item: place(item.path))


def pytest_collection_finish():
    freeze_objects()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Fork the server of ranks: after the collection, during which pytest records warnings."""
    if (groups := sys.modules.get("helpers.groups")) and not session.config.option.collectonly:
        groups.start_server()


def pytest_ignore_collect(collection_path, config):
    """Import only the files that have tests for a GPU: all take minutes, and packages that GPU machines lack."""
    is_test = config.option.markexpr == "gpu" and collection_path.match("test_*.py")
    return True if is_test and "mark.gpu" not in collection_path.read_text() else None


@pytest.fixture(scope="session", autouse=True)
def _one_cpu():
    set_cpu()


@pytest.fixture(scope="session", autouse=True)
def _folders(tmp_path_factory):
    """The folder that the session's fixtures run in, and those of the modules and tests."""
    os.environ["COLUMNS"] = "80"  # not before pytest has read the terminal's
    folders = Folders(tmp_path_factory.mktemp("empty"))
    with folders.inside(is_shared=True):
        yield folders


@pytest.fixture(scope="module", autouse=True)
def _module_folder(_folders):
    freeze_objects()  # what the files before have imported
    with _folders.inside(is_shared=True):
        yield


@pytest.fixture(scope="module", autouse=True)
def _without_installed_extensions(request):
    """Those of extensions/ that have a distribution are installed and would add names; they have separate tests."""
    from toolkit import extension

    is_theirs = (request.path.parents[1] / "pyproject.toml").exists() and "extensions" in request.path.parts
    with nullcontext() if is_theirs else mock.patch.object(extension, "_installed", dict):
        yield


@pytest.fixture(autouse=True)
def _own_folder(_module_folder, _folders):
    _collections.freeze()
    environment = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with _folders.inside():
        yield
    replace_environment(environment)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _short_outputs():
    """The fixture ``plots`` brings loss.png back."""
    trains = "toolkit.training.engine" in sys.modules  # imported by the files that train
    with short_outputs() if trains else nullcontext():
        yield


@pytest.fixture
def plots(monkeypatch):
    from toolkit_report import page, plot

    monkeypatch.setattr(page, "plot_loss", plot.plot_loss)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of 12 text files, about 60 kB together."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for i in range(12):
        text = ". ".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 12))) for _ in range(100))
        (folder / f"part{i:02}.txt").write_text(text + "\n")
    return folder


@pytest.fixture
def refusal(capsys):
    """Run a command that must end with exit code 2 and one line; return the line, without notes before it."""
    from toolkit.cli import main

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2, words
        *notes, line = capsys.readouterr().err.splitlines(keepends=True)
        assert line.startswith(("toolkit ", "toolkit: ")) and "Traceback (most recent call last):\n" not in notes, [
            *notes,
            line,
        ]
        return line

    return run


@pytest.fixture
def web(monkeypatch):
    """The address of a server of the files in the current folder."""
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size, such as "3m", and returns its folder; skips where that is not permitted."""
    disk = tmp_path / "disk"

    def mount(size: str) -> Path:
        disk.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], capture_output=True).returncode:
            pytest.skip("mounting a small file system is not permitted here")
        return disk

    yield mount
    if disk.is_mount():
        subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """The random models of transformers by name; see helpers/tiny_models.py."""
    from helpers.tiny_models import TinyModels

    base = tmp_path_factory.getbasetemp()  # of pytest-xdist's workers, each has one, in a folder of the run
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny-models"
    folder.mkdir(exist_ok=True)
    return TinyModels(folder)


@pytest.fixture
def ragged():
    from helpers.ragged import RaggedRows

    from toolkit.data.base import PreparedData

    return PreparedData(RaggedRows(40), RaggedRows(13), None, "key", "ragged rows")


@pytest.fixture
def fabric():
    from lightning.fabric import Fabric

    return Fabric(accelerator="cpu", devices=1)


@pytest.fixture
def pico():
    """A small model of the vocabulary of ``ragged``."""
    from helpers.initialize import initialize
    from helpers.ragged import VOCABULARY

    from toolkit.models.families import get_config
    from toolkit.models.gpt import GPT

    model = GPT(get_config("pico-llama").with_vocab_size(VOCABULARY))
    initialize(model, seed=1)
    return model
