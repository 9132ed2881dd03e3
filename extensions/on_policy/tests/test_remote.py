"""Answers of a run on remote storage: uploaded and deleted with the checkpoints, the same on another machine."""

import shutil
from pathlib import Path

import fsspec
import pytest
from helpers.compare_runs import curve, require_same
from helpers.on_policy import GRPO_RUN, run
from helpers.s3 import BUCKET, serve

from toolkit.checkpoints.remote.uploader import Uploader
from toolkit.checkpoints.store import ROLLOUTS
from toolkit.training.engine import Engine

WORDS = f"{GRPO_RUN} --eval.interval 0 --eval.final_validation false --train.max_steps 8 --train.save_interval 2"


@pytest.mark.parametrize("kind", ["memory", pytest.param("s3", marks=pytest.mark.slow)])
def test_answers_are_uploaded_and_a_lost_machine_changes_nothing(folder, kind, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    words, url = f"{WORDS} --train.keep_last 2", f"{kind}://{BUCKET}/answers"
    assert run(words, "local") == 0
    if kind == "s3":
        with serve() as server:
            for name, value in server.environ.items():
                monkeypatch.setenv(name, value)
            require_resumes_elsewhere(words, url, monkeypatch)
    else:
        require_resumes_elsewhere(words, url, monkeypatch)


def require_resumes_elsewhere(words: str, url: str, monkeypatch) -> None:
    fs, path = fsspec.core.url_to_fs(url)

    def remote() -> dict[str, bytes]:
        fs.invalidate_cache()
        return {Path(name).name: fs.cat_file(name) for name in fs.find(f"{path}/{ROLLOUTS}")}

    stops = Engine._stops_before_step
    with monkeypatch.context() as patched:

        def is_lost(self, totals):
            if self.run.progress.step == 5:
                for uploader in [c.uploader for c in self.run.callbacks if hasattr(c, "uploader")]:
                    uploader.wait(None)
                raise KeyboardInterrupt
            return stops(self, totals)

        patched.setattr(Engine, "_stops_before_step", is_lost)
        patched.setattr(Uploader, "upload_outputs", lambda self: None)  # at the end
        assert run(f"{words} --staging_dir one", url) == 130
    assert {"step-00000003.jsonl", "step-00000004.jsonl"} & set(remote())  # uploaded with the checkpoint after step 4
    local = {file.name: file.read_bytes() for file in Path("local", ROLLOUTS).iterdir()}
    assert all(local.get(name, content) == content for name, content in remote().items())
    shutil.rmtree("one")
    assert run(f"{words} --staging_dir two --resume auto", url) == 0
    require_same(Path("local"), Path("two"))
    assert [row["reward"] for row in curve("two")] == [row["reward"] for row in curve("local")]
    assert remote() == {file.name: file.read_bytes() for file in Path("two", ROLLOUTS).iterdir()}
    assert "step-00000002.jsonl" not in remote() and remote()["step-00000007.jsonl"] == local["step-00000007.jsonl"]
