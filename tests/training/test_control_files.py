"""STOP and SAVE_NOW in a run's folder, and --train.max_skipped."""

import json
import shutil
from types import SimpleNamespace

import pytest
from helpers.compare_runs import assert_same_weights
from helpers.processes import finish, flags_for, pretrain
from helpers.s3 import BUCKET, serve

from toolkit.checkpoints.store import SAVE_NOW, STOP
from toolkit.config import TrainArgs
from toolkit.errors import GuardError
from toolkit.training import control_files
from toolkit.training.control_files import ControlFiles
from toolkit.training.run import Run
from toolkit.training.step import StepResult

TRAIN = {"max_steps": 8, "save_interval": 0}


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    assert run(corpus, out)[0] == 0
    return out


def run(corpus, out, name=None, *more, n_ranks=1, **environ):
    callback = [{"class_path": "helpers.faulty_callbacks.Touch", "init_args": {"name": name, "step": 3}}]
    flags = ["--callbacks", json.dumps(callback)] if name else []
    process = pretrain(*flags_for(corpus, out, **TRAIN), "--devices", str(n_ranks), *flags, *more, **environ)
    texts = finish(process)
    return process.returncode, *texts


def checkpoints(out):
    return sorted(p.name for p in out.iterdir() if p.is_dir() and p.name.startswith(("step-", "final", ".")))


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stop_saves_exits_with_0_and_the_resume_is_bit_equal(corpus, tmp_path, undisturbed, n_ranks):
    code, _, err = run(corpus, tmp_path / "run", STOP, n_ranks=n_ranks)
    assert code == 0 and checkpoints(tmp_path / "run") == ["step-00000003"]
    assert len(err.splitlines()) == 1 and "stopped after step 3" in err and "resume with --resume auto" in err
    assert not (tmp_path / "run" / STOP).exists()
    assert run(corpus, tmp_path / "run", n_ranks=n_ranks)[0] == 0
    if n_ranks == 1:
        assert_same_weights(tmp_path / "run" / "final", undisturbed / "final")


@pytest.mark.slow
def test_stop_in_the_staging_folder_of_a_remote_run_is_deleted_and_the_checkpoint_uploaded(
    corpus, tmp_path, undisturbed
):
    staging = tmp_path / "staging"
    with serve() as server:
        url = f"s3://{BUCKET}/stopped"

        def launch(name=None):
            return run(corpus, url, name, "--staging_dir", str(staging), **server.environ)

        code, _, err = launch(STOP)
        assert code == 0 and "stopped after step 3" in err and len(err.splitlines()) == 1, err
        assert server.checkpoints("stopped") == {"step-00000003"}
        assert not (staging / STOP).exists() and STOP not in server.objects("stopped/")
        shutil.rmtree(staging)  # a clean machine
        assert launch()[0] == 0
        assert_same_weights(staging / "final", undisturbed / "final")


@pytest.mark.parametrize("more", [(), pytest.param(("--train.async_save", "true"), marks=pytest.mark.slow)])
def test_save_now_saves_once(corpus, tmp_path, undisturbed, more):
    more = (*more, "--train.save_interval", "7") if more else ()
    code, _, err = run(corpus, tmp_path / "run", SAVE_NOW, *more)
    assert code == 0 and not (tmp_path / "run" / SAVE_NOW).exists(), err
    assert "step-00000004" in checkpoints(tmp_path / "run") and "step-00000005" not in checkpoints(tmp_path / "run")
    assert_same_weights(tmp_path / "run" / "final", undisturbed / "final")


def test_folders_and_files_that_cannot_be_deleted_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(control_files, "LOOK_EVERY_S", 0.0)
    files = ControlFiles(tmp_path)
    (tmp_path / STOP).mkdir()
    (tmp_path / SAVE_NOW).touch()
    assert files.look() == {STOP: 0, SAVE_NOW: 1}

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.unlink", refuse)
    with pytest.warns(UserWarning, match="cannot be deleted"):
        files.remove(SAVE_NOW)
    assert files.look() == {STOP: 0, SAVE_NOW: 0}
    assert ControlFiles(tmp_path / "missing").look() == {STOP: 0, SAVE_NOW: 0}


def test_rank_0_looks_once_a_second(tmp_path):
    (tmp_path / STOP).touch()
    files = ControlFiles(tmp_path)
    assert [files.look()[STOP] for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize(("norm", "message"), [(float("inf"), "no fp16 loss scale"), (1.0, "spike")])
def test_max_skipped_counts_steps_in_a_row(norm, message):
    result = StepResult(1.0, norm, True, {})
    args = SimpleNamespace(train=TrainArgs(max_skipped=2))
    progress = SimpleNamespace(step=6)
    run = SimpleNamespace(skipped_steps=0, skipped_in_a_row=0, args=args, progress=progress)
    for skipped in (True, True, False, True, True):
        Run.count_skipped(run, result._replace(skipped=skipped))
    with pytest.raises(GuardError, match=f"step 7: .*{message}.* in 3 steps"):
        Run.count_skipped(run, result)
    assert run.skipped_steps == 5
