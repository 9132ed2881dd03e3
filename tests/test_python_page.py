"""The scripts of python.md, the last one under torchrun with fsdp and ddp, on local data and a small GPT-2."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.groups import losses

import toolkit
from toolkit.api import TrainResult
from toolkit.data import HuggingFaceText
from toolkit.data.tokenizer import train_bpe

ROOT = Path(__file__).parents[1]


PAGE = (ROOT / "tutorials" / "python.md").read_text()
SCRIPTS = dict(re.findall(r"`(train_\w+\.py)`(?:, for a folder of texts)?:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
FSDP = SCRIPTS["train_fsdp.py"]
DDP = re.sub(r" *sharding_strategy=.*\n", "", FSDP.replace('strategy="fsdp"', 'strategy="ddp"')).replace(
    "-fsdp", "-ddp"
)
SMALL = 'model_config={"n_layer": 2, "n_embd": 32, "n_head": 2, "block_size": 64}, devices="auto", accelerator="cpu",'
LOCAL = {
    'repo_id="HuggingFaceFW/fineweb-edu", subset="sample-10BT"': 'path="texts/*.jsonl", cache_dir="cache"',
    'model="gpt2",': f'model="gpt2", {SMALL}',
    "context_length=1024": "context_length=64",
    "batch_size=16": "batch_size=4",
    "max_steps=1000, log_interval=10": "max_steps=4, log_interval=1",
}


def localized(script: str) -> str:
    """Return a script of the page that reads local files and trains a small model."""
    for old, new in LOCAL.items():
        script = script.replace(old, new)
    assert "fineweb" not in script and "1000" not in script and SMALL in script
    return script


@pytest.fixture(scope="module")
def workplace(tmp_path_factory, corpus) -> Path:
    """A folder with texts as FineWeb-Edu has them, and a tokenizer."""
    folder = tmp_path_factory.mktemp("python-page")
    (folder / "texts").mkdir()
    texts = [file.read_text() for file in sorted(corpus.iterdir())]
    for number in range(2):
        lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(texts[number::2] * 4)]
        (folder / "texts" / f"part-{number}.jsonl").write_text("\n".join(lines))
    train_bpe(texts, 300).save(folder / "checkpoints" / "gpt2")
    return folder


def test_page_begins_with_a_run_of_train(workplace, monkeypatch, capsys):
    """The first script as it stands, in 4 steps; test_api.py runs the second one."""
    monkeypatch.chdir(workplace)
    (workplace / "my_texts").symlink_to("texts")
    assert list(SCRIPTS) == ["train_text.py", "train_module.py", "train_fsdp.py"]
    exec(re.sub(r'"max_steps": \d+', '"max_steps": 4', SCRIPTS["train_text.py"]), {})
    printed = capsys.readouterr().out
    assert re.search(r"^loss \d+\.\d{3} after 8,192 tokens: out/text/final\n.", printed, re.M)


def test_arguments_of_the_scripts_are_known(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []
    result = TrainResult(tmp_path, tmp_path, 4, 1000, {"loss": 3.0})
    monkeypatch.setattr(
        toolkit.Trainer, "fit", lambda trainer, **limits: seen.append(trainer.arguments(**limits)) or result
    )
    for script in (DDP, FSDP):
        exec(script, {"__name__": "__main__"})
    ddp, fsdp = seen
    assert (ddp["model"], ddp["strategy"], fsdp["strategy"]) == ("gpt2", "ddp", "fsdp")
    assert ddp["train"]["global_batch_size"] == 16 * 4 and fsdp["fsdp"] == {"sharding_strategy": "FULL_SHARD"}
    assert all(isinstance(run["dataset"], HuggingFaceText) for run in seen)
    assert capsys.readouterr().out.count("loss 3.000 after 1,000 tokens") == 2


@pytest.mark.slow
def test_scripts_run_under_torchrun(workplace):
    for name, script in (("train_ddp.py", DDP), ("train_fsdp.py", FSDP)):
        (workplace / name).write_text(localized(script))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        done = subprocess.run([*launcher, name], cwd=workplace, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        out_dir = workplace / re.search(r'out_dir="(.+?)"', script)[1]
        assert len(re.findall(r"^loss .* tokens: \S+/final$", done.stdout, re.MULTILINE)) == 1
        assert losses(out_dir)[-1] < losses(out_dir)[0]
        assert toolkit.load(out_dir / "final").config.n_layer == 2
