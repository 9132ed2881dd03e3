import importlib.util
import math
import os
import sys
import types
import uuid
import warnings
from pathlib import Path

import pytest

from toolkit.config import LogArgs
from toolkit.errors import UserError
from toolkit.ui import loggers
from toolkit.ui.loggers import COLUMNS, MetricsCSV, check_loggers, log_metrics, make_loggers, read_metrics, rows_crc

HEADER = "step,tokens,loss,learning_rate,grad_norm,tokens_per_sec,mfu,peak_memory_gb,val_loss,val_ppl,val_bpb,seconds"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "logs" / "metrics.csv"


def installed(name: str) -> types.ModuleType:
    """Return an empty package."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    return module


def write_steps(path: Path, *steps: int, resume_step: int | None = None) -> None:
    metrics = MetricsCSV(path, resume_step)
    for step in steps:
        metrics.write({"step": step, "tokens": step * 64, "loss": 1 / step, "seconds": 0.5 * step})
    metrics.close()


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(path)]


def test_columns_match_the_documentation(path):
    MetricsCSV(path, None).close()
    assert path.read_text() == HEADER + "\n"


def test_row_is_written_immediately_in_full_precision_with_empty_cells(path):
    metrics = MetricsCSV(path, None)
    metrics.write({"step": 3, "tokens": 192, "loss": 0.1 + 0.2, "mfu": None, "grad_norm": math.nan, "val_loss": 1 / 3})
    assert path.read_text().splitlines()[1] == "3,192,0.30000000000000004,,nan,,,,0.3333333333333333,,,"
    metrics.close()
    row = read_metrics(path)[0]
    assert (row["loss"], row["val_loss"]) == (0.1 + 0.2, 1 / 3)
    assert math.isnan(row["mfu"]) and list(row) == list(COLUMNS)


def test_numpy_numbers_are_written_as_numbers(path):
    import numpy as np

    metrics = MetricsCSV(path, None)
    metrics.write({"step": np.int64(1), "loss": np.float64(0.1)})
    metrics.close()
    assert read_metrics(path)[0]["loss"] == 0.1
    assert "np." not in path.read_text()


def test_metric_without_a_column_is_an_error(path):
    metrics = MetricsCSV(path, None)
    with pytest.raises(UserError, match="metric accuracy: is not a column"):
        metrics.write({"step": 1, "accuracy": 0.5})
    metrics.close()


def test_resume_removes_rows_beyond_its_checkpoint(path):
    write_steps(path, *range(1, 11))
    kept = path.read_bytes().splitlines(keepends=True)[:8]
    write_steps(path, 8, 9, resume_step=7)
    assert path.read_bytes().splitlines(keepends=True)[:8] == kept, "earlier rows are unchanged"
    assert steps(path) == list(range(1, 10))
    assert os.listdir(path.parent) == ["metrics.csv"]


def test_resume_removes_truncated_rows(path):
    write_steps(path, 1, 2, 3)
    complete = path.read_bytes()
    for cut in range(1, 12):
        path.write_bytes(complete[:-cut])
        write_steps(path, 3, resume_step=3)
        assert path.read_bytes() == complete, cut


def test_resume_removes_invalid_lines(path):
    write_steps(path, 1)
    with open(path, "ab") as file:
        file.write(b"2,128,0.5\n" + b"\0" * 30 + b"\n" + b",,,,,,,,,,,\n" + b"\xff,1,2,3,4,5,6,7,8,9,10,11\n")
    assert steps(path) == [1]
    write_steps(path, 2, resume_step=5)
    assert steps(path) == [1, 2]


def test_missing_file_is_created_on_resume(path):
    write_steps(path, 6, resume_step=5)
    assert path.read_text().startswith(HEADER) and steps(path) == [6]
    assert read_metrics(path.with_name("none.csv")) == []


def test_crc_of_rows_stays_when_a_resume_adds_columns(path):
    csv = MetricsCSV(path, None)
    csv.write({"step": 1, "loss": 2.0})
    csv.close()
    crc = rows_crc(path, 1)
    MetricsCSV(path, 1, ["slowest_rank"]).close()
    assert rows_crc(path, 1) == crc
    path.write_text(path.read_text().replace("2.0", "3.0"))
    assert rows_crc(path, 1) != crc


def test_new_run_starts_a_new_file(path):
    write_steps(path, 1, 2, 3)
    write_steps(path, 1)
    assert steps(path) == [1]


def test_file_with_other_columns_is_not_modified(path):
    path.parent.mkdir()
    path.write_text("step,loss\n1,2.0\n")
    with pytest.raises(UserError, match=r"metrics.csv: lacks columns .* move the file away"):
        MetricsCSV(path, 1)
    assert path.read_text() == "step,loss\n1,2.0\n"


def test_failed_row_removal_keeps_the_old_file(path, monkeypatch):
    write_steps(path, 1, 2, 3)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"metrics.csv: No space left on device; free some space"):
        MetricsCSV(path, 1)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["metrics.csv"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_a_one_line_error(path):
    metrics = MetricsCSV(path, None)
    metrics._file.close()
    metrics._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics.csv: No space left on device; free some space$"):
        metrics.write({"step": 1})
    metrics.close()  # no second error


def test_csv_needs_no_additional_logger(tmp_path):
    assert make_loggers("csv", tmp_path, LogArgs(), {}) == []


@pytest.mark.parametrize(
    ("name", "hint"), [("tensorbord", "did you mean 'tensorboard'"), ("x", "use csv, tensorboard")]
)
def test_unknown_logger_suggests_the_closest(name, hint, tmp_path):
    with pytest.raises(UserError, match=f"--logger_name {name}: no such logger.*{hint}"):
        make_loggers(name, tmp_path, LogArgs(), {})


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_missing_package_error_has_the_install_command(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"^--logger_name {name}: .*pip install {name}$"):
        check_loggers(name, LogArgs())


def test_tensorboard_has_metrics_and_hyperparameters(tmp_path):
    (logger,) = make_loggers("tensorboard", tmp_path, LogArgs(), {"train": {"learning_rate": 4e-4, "epochs": None}})
    for step in (1, 2, 3):
        log_metrics([logger], {"loss": 1 / step, "mfu": None}, step)
    logger.finalize("success")
    # killed here and resumed from the checkpoint of step 2
    (logger,) = make_loggers("tensorboard", tmp_path, LogArgs(), {}, resume_step=2)
    log_metrics([logger], {"loss": 0.25}, 3)
    logger.finalize("success")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard")).Reload()
    points = [(point.step, point.value) for point in events.Scalars("loss")]
    assert points == [(1, 1.0), (2, 0.5), (3, 0.25)]
    assert "mfu" not in events.Tags()["scalars"]
    written = b"".join(file.read_bytes() for file in (tmp_path / "logs" / "tensorboard").iterdir())
    assert b"train/learning_rate" in written


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_service_continues_its_run(tmp_path, monkeypatch, name):
    """With the real package where it is installed. Killed after step 3, resumed from step 2: each step is one point."""
    module = None if importlib.util.find_spec(name) is None else name
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs: list[tuple[str, int, float]] = []
    if module is None:
        monkeypatch.setitem(sys.modules, name, installed(name))
        start = lambda folder, _, step: Service(runs, loggers._run_id(folder, name, step))  # noqa: E731
        monkeypatch.setitem(loggers._START, name, start)

    def end(logger) -> None:
        logger.finalize("success")
        if module == "wandb":
            sys.modules["wandb"].finish()  # as the end of a process does

    (logger,) = make_loggers(name, tmp_path, LogArgs(), {"max_steps": 3})
    for step in (1, 2, 3):
        log_metrics([logger], {"loss": 1 / step}, step)
    end(logger)
    first = (tmp_path / "logs" / f"{name}.id").read_text()
    with pytest.warns(UserWarning, match=f"{name} keeps its points up to step 3"):
        (logger,) = make_loggers(name, tmp_path, LogArgs(), {"max_steps": 4}, resume_step=2, logged_step=3)
    for step in (3, 4):
        log_metrics([logger], {"loss": 1 / step}, step)
    end(logger)
    assert (tmp_path / "logs" / f"{name}.id").read_text() == first
    if module == "mlflow":
        history = logger._logger.experiment.get_metric_history(first, "loss")
        runs += [(first, point.step, point.value) for point in history]
    elif module == "wandb":
        assert {path.name.rpartition("-")[2] for path in (tmp_path / "logs" / "wandb").glob("offline-run-*")} == {first}
    if module != "wandb":
        assert runs == [(first, step, 1 / step) for step in (1, 2, 3, 4)]
    end(make_loggers(name, tmp_path, LogArgs(), {})[0])
    assert (tmp_path / "logs" / f"{name}.id").read_text() != first, "a new run has a new id"


class Service:
    """A logger as Lightning's of W&B and MLflow."""

    experiment = None

    def __init__(self, runs: list, run_id: str | None) -> None:
        self.runs, self.version = runs, run_id or uuid.uuid4().hex

    def log_hyperparams(self, values) -> None:
        pass

    def log_metrics(self, metrics, step) -> None:
        self.runs.append((self.version, step, metrics["loss"]))

    def finalize(self, status) -> None:
        pass


def test_several_loggers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", installed("wandb"))
    started = {"tensorboard": Recorder(), "wandb": Recorder()}
    for name, logger in started.items():
        monkeypatch.setitem(loggers._START, name, lambda *args, logger=logger: logger)
    tensorboard, wandb = make_loggers("csv,tensorboard, wandb", tmp_path, LogArgs(group="g"), {})
    assert [tensorboard, wandb._logger] == list(started.values())
    for names, message in [("csv,tensorbord", "did you mean 'tensorboard'"), ("csv,", "no such logger; use csv, ")]:
        with pytest.raises(UserError, match=f"--logger_name {names}: .*{message}"):
            make_loggers(names, tmp_path, LogArgs(), {})
    with pytest.raises(UserError, match="--log.group: has no effect with --logger_name csv,tensorboard"):
        check_loggers("csv,tensorboard", LogArgs(group="g"))


class Recorder:
    version, experiment = "id", None

    def log_hyperparams(self, values) -> None:
        pass


def test_logger_that_does_not_start_is_a_one_line_error(tmp_path, monkeypatch):
    def not_logged_in(folder, log_args, resume_step):
        raise RuntimeError("No API key configured.\nUse `wandb login` to log in.")

    monkeypatch.setitem(sys.modules, "wandb", installed("wandb"))
    monkeypatch.setitem(loggers._START, "wandb", not_logged_in)
    with pytest.raises(UserError) as caught:
        make_loggers("wandb", tmp_path, LogArgs(), {})
    assert "\n" not in str(caught.value) and "No API key configured. Use `wandb login`" in str(caught.value)


def test_logger_failure_during_training_is_a_warning():
    class Lost:
        def log_metrics(self, metrics, step):
            raise ConnectionError("no answer")

    class Working:
        def __init__(self):
            self.seen = []

        def log_metrics(self, metrics, step):
            self.seen.append((metrics, step))

    working = Working()
    with pytest.warns(UserWarning, match="Lost failed .no answer.*metrics.csv"):
        log_metrics([Lost(), working], {"loss": 1, "mfu": None}, 7)
    assert working.seen == [({"loss": 1.0}, 7)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log_metrics([], {"loss": 1.0}, 8)
