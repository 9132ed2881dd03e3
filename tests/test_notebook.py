"""The cells of tutorials/first_ten_minutes.ipynb, from top to bottom."""

import json
import shlex
from pathlib import Path

import pytest

from toolkit.cli import main

NOTEBOOK = Path(__file__).parents[1] / "tutorials" / "first_ten_minutes.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
SMALL = {
    'PythonStdlib(vocab_size=2048)': 'TextFiles("texts", vocab_size=300)',
    '"max_steps": 400': '"max_steps": 3',
    '"max_steps": 440': '"max_steps": 4',
    '"epochs": 4': '"max_steps": 2',
}  # fmt: skip


def run_cells(changes: dict[str, str]) -> None:
    """Run Python in this process, as one kernel does, and the commands of ``!`` lines, too."""
    names = {"__name__": "__main__"}
    for cell in CELLS:
        source = "".join(cell["source"])
        for old, new in changes.items():
            source = source.replace(old, new)
        if cell["cell_type"] != "code":
            continue
        if source.startswith("!"):
            program, *words = shlex.split(source[1:])
            assert program == "toolkit" and main(words) == 0
        else:
            exec(compile(source, cell["id"], "exec"), names)


def test_outputs_are_stripped():
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert len(code) > 6 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)


def test_notebook_runs_in_few_steps(tmp_path, monkeypatch, capfd, corpus):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").symlink_to(corpus)
    text = NOTEBOOK.read_text().replace('\\"', '"')
    assert all(old in text for old in SMALL)
    run_cells(SMALL)
    out, _ = capfd.readouterr()
    assert "step    1  loss " in out and "\n4\n" in out and (tmp_path / "out" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_notebook_learns(tmp_path, monkeypatch, capfd):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    run_cells({})
    out, _ = capfd.readouterr()
    assert "\n6\n" in out.partition("toolkit chat")[0] or "\n6" in out  # the letters of lambda
