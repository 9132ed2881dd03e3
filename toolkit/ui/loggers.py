"""Log metrics to ``logs/metrics.csv``, and optionally to Lightning loggers."""

import importlib.util
import math
import os
import warnings
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from toolkit.config import LogArgs
from toolkit.errors import UserError, did_you_mean, one_line
from toolkit.extension import load_registered, registered
from toolkit.io.atomic import file_error, write_atomic
from toolkit.io.safe_parse import no_follow, open_regular, read_bounded
from toolkit.ui.progress import Metrics

COLUMNS = (
    "step",  # optimizer steps done
    "tokens",  # input tokens so far over all ranks, without padding
    "loss",  # of this step's global batch, nats per token
    "learning_rate",
    "grad_norm",  # before clipping
    "tokens_per_sec",  # over all ranks, since the previous row
    "mfu",  # model FLOPs utilization, 0 to 1
    "peak_memory_gb",
    "val_loss",  # nats per token
    "val_ppl",
    "val_bpb",  # bits per byte
    "seconds",  # wall time of the steps so far, over all launches
)
_USED_OPTIONS: dict[str, set[str]] = {
    "tensorboard": set(), "wandb": {"project", "run", "group"}, "mlflow": {"project", "run"},
    "trackio": {"project", "run", "group"},
}  # fmt: skip
LOGGERS = ("csv", *_USED_OPTIONS)
"""Logger names. All but csv are also the names of required packages."""


class MetricsCSV:
    """Writes one row per logged step, immediately and in full precision. Missing values are empty cells.

    Args:
        resume_step: Remove rows after this step, atomically. ``None`` starts a new file.
        more_columns: Columns that callbacks add after :data:`COLUMNS`. Columns from earlier launches are kept.

    Attributes:
        n_resumed: Number of rows from earlier launches.
        logged_step: Last step of the rows from earlier launches, removed ones included; 0 without any.
    """

    def __init__(self, path: str | Path, resume_step: int | None, more_columns: Iterable[str] = ()) -> None:
        self.path = Path(path)
        try:
            old_columns, rows = ([], []) if resume_step is None else _read(self.path)
            self.columns = list(dict.fromkeys([*COLUMNS, *old_columns, *more_columns]))
            resumed = [self._line(row) for row in rows if float(row["step"]) <= (resume_step or 0)]
            self.n_resumed = len(resumed)
            self.logged_step = max((int(float(row["step"])) for row in rows), default=0)
            write_atomic(self.path, b"".join([(",".join(self.columns) + "\n").encode(), *resumed]))
            # unbuffered: a row that failed on a full disk must not be written at close
            self._file = open(self.path, "ab", buffering=0, opener=no_follow)  # noqa: SIM115 (open for the duration of the run)
        except OSError as error:
            raise file_error(self.path, error) from error

    def write(self, row: Metrics) -> None:
        """Append a row. Columns that are missing or ``None`` are left empty."""
        if extra := sorted(row.keys() - set(self.columns)):
            raise UserError(f"metric {extra[0]}: is not a column of metrics.csv; list it in the callback's `columns`")
        present = ((name, value) for name, value in row.items() if value is not None)
        line = self._line({name: repr(value if isinstance(value, int) else float(value)) for name, value in present})
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise file_error(self.path, error) from error

    def _line(self, cells: Mapping[str, str]) -> bytes:
        return (",".join(cells.get(name, "") for name in self.columns) + "\n").encode()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """Read metrics.csv as numbers. Empty cells are NaN. A missing file has no rows."""
    return [{name: float(cell or "nan") for name, cell in cells.items()} for cells in _read(Path(path))[1]]


def rows_crc(path: Path, count: int) -> int:
    """Return the CRC-32 of the first ``count`` rows of metrics.csv; 0 if it cannot be read."""
    with suppress(OSError, ValueError):
        rows = read_bounded(path, "log").splitlines()[1 : count + 1]
        return zlib.crc32(b"\n".join(row.rstrip(b",") for row in rows))  # a later launch may add columns, empty here
    return 0


def check_loggers(logger_name: str, log_args: LogArgs) -> list[str]:
    """Split a list such as "csv,tensorboard". Check the names, options and packages."""
    names = list(dict.fromkeys(name.strip() for name in logger_name.split(",")))
    valid_names = [*LOGGERS, *registered("loggers", LOGGERS)]
    for name in names:
        if name not in valid_names:
            hint = did_you_mean(name, valid_names) or f"; use {', '.join(valid_names)}, or several separated by commas"
            raise UserError(f"--logger_name {logger_name}: no such logger{hint}")
    options = {f.name for f in fields(log_args) if getattr(log_args, f.name) != f.default}
    for option in sorted(options.difference({"format", "price"}, *(_USED_OPTIONS.get(name, set()) for name in names))):
        raise UserError(f"--log.{option}: has no effect with --logger_name {logger_name}; remove it, or use wandb")
    for name in names:
        # not imported: trackio reads TRACKIO_DIR when it is
        if name in _USED_OPTIONS and importlib.util.find_spec(name) is None:
            raise UserError(f"--logger_name {name}: {name} is not installed; run: pip install {name}")
    return names


def make_loggers(
    logger_name: str,
    out_dir: str | Path,
    log_args: LogArgs,
    hyperparameters: dict[str, Any],
    resume_step: int | None = None,
    logged_step: int = 0,
) -> list[Any]:
    """Start the loggers other than metrics.csv. Call this on rank 0 only.

    Args:
        logger_name: One or more logger names, separated by commas.
        out_dir: Run folder. Loggers write local files to ``out_dir/logs``.
        log_args: Project, run and group names for W&B, MLflow and trackio.
        hyperparameters: Hyperparameters to log; must not contain secrets.
        resume_step: TensorBoard and trackio drop points after this step from interrupted launches.
        logged_step: Last step of interrupted launches. W&B and MLflow keep their points and continue after it.
    """
    loggers, folder = [], Path(out_dir) / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for name in check_loggers(logger_name, log_args):
        if name == "csv":
            continue
        try:
            start = _START[name] if name in LOGGERS else load_registered("loggers", name)
            logger = start(folder, log_args, resume_step)
            if name in ("wandb", "mlflow"):
                continues = _run_id(folder, name, resume_step) is not None
                logger = _ServiceRun(logger, folder / f"{name}.id", logged_step if continues else None)
                if continues and logged_step > (resume_step or 0):
                    warnings.warn(
                        f"{name} keeps its points up to step {logged_step}; metrics.csv has this launch's", stacklevel=2
                    )
            # this connects: a wrong key or address fails here, before the first step
            logger.log_hyperparams(hyperparameters)
        except Exception as error:
            reason = one_line(error) or type(error).__name__
            raise UserError(
                f"--logger_name {name}: did not start ({reason}); correct its settings, or use --logger_name csv"
            ) from error
        loggers.append(logger)
    return loggers


class _ServiceRun:
    """A run of a service that cannot replace points, which later launches continue under its id.

    Args:
        logger: Lightning logger of W&B or MLflow.
        id_file: Gets the run's id.
        logged_step: Last step of earlier launches; later steps are logged. None: the run is new.
    """

    def __init__(self, logger: Any, id_file: Path, logged_step: int | None) -> None:
        self._logger, self._id_file, self._logged_step = logger, id_file, logged_step

    def log_hyperparams(self, values: dict[str, Any]) -> None:
        """Connect. MLflow refuses hyperparameters that differ from the first launch's, such as a later last step."""
        if self._logged_step is None:
            self._logger.log_hyperparams(values)
        self._logger.experiment  # noqa: B018  # connects
        write_atomic(self._id_file, self._logger.version.encode())

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if self._logged_step is None or step > self._logged_step:
            self._logger.log_metrics(metrics, step)

    def finalize(self, status: str) -> None:
        self._logger.finalize(status)


def _run_id(folder: Path, name: str, resume_step: int | None) -> str | None:
    """Return the id of the service's run that a resumed run continues; None starts a new one."""
    path = folder / f"{name}.id"
    if resume_step is None or not path.exists():
        return None
    with open_regular(path, no_follow) as file:
        return file.read(100).decode(errors="replace").strip() or None


def log_metrics(loggers: Iterable[Any], metrics: Metrics, step: int) -> None:
    """Send metrics to the loggers, without ``None`` values.

    A logger that fails during a run (for example, a lost connection) only causes a warning. metrics.csv has every row.
    """
    present = {name: float(value) for name, value in metrics.items() if value is not None}
    for logger in loggers:
        try:
            logger.log_metrics(present, step)
        except Exception as error:
            reason = one_line(error)
            warnings.warn(f"{type(logger).__name__} failed ({reason}); logs/metrics.csv has the metrics", stacklevel=2)


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the cells of each row. Drop rows truncated by a kill or a full disk."""
    if not path.exists():
        return [], []
    try:
        content = read_bounded(path, "log")
    except ValueError as error:
        raise UserError(f"{path.parent}: {error}; move the file away and resume") from error
    lines = content.decode(errors="replace").split("\n")[:-1]  # the last has no line end: truncated, or empty
    if not lines:
        return [], []
    columns = lines[0].split(",")
    if not set(COLUMNS) <= set(columns):
        raise UserError(f"{path}: lacks columns that this version writes; move the file away and resume")
    rows = []
    for line in lines[1:]:
        with suppress(ValueError):  # fewer cells, or no numbers: truncated
            row = dict(zip(columns, line.split(","), strict=True))
            if math.isfinite([float(cell or "nan") for cell in row.values()][columns.index("step")]):
                rows.append(row)
    return columns, rows


def _start_tensorboard(folder: Path, log_args: LogArgs, resume_step: int | None) -> Any:
    from lightning.fabric.loggers import TensorBoardLogger

    purge_step = None if resume_step is None else resume_step + 1
    return TensorBoardLogger(folder, name="tensorboard", version="", purge_step=purge_step)


def _start_wandb(folder: Path, log_args: LogArgs, resume_step: int | None) -> Any:
    from lightning.pytorch.loggers import WandbLogger

    run_id = _run_id(folder, "wandb", resume_step)
    return WandbLogger(project=log_args.project, name=log_args.run, group=log_args.group, save_dir=folder, id=run_id)


def _start_mlflow(folder: Path, log_args: LogArgs, resume_step: int | None) -> Any:
    from lightning.pytorch.loggers import MLFlowLogger

    # MLflow 3 no longer supports plain files (file:...): the local store is a database
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
    run_id = _run_id(folder, "mlflow", resume_step)
    return MLFlowLogger(experiment_name=log_args.project, run_name=log_args.run, tracking_uri=uri, run_id=run_id)


def _start_trackio(folder: Path, log_args: LogArgs, resume_step: int | None) -> Any:
    from toolkit.ui.trackio_logger import TrackioLogger

    rows = read_metrics(folder / "metrics.csv")  # ends at resume_step
    name = log_args.run or folder.absolute().parent.name
    return TrackioLogger(folder / "trackio", log_args.project, name, log_args.group, rows)


_START = {
    "tensorboard": _start_tensorboard, "wandb": _start_wandb, "mlflow": _start_mlflow, "trackio": _start_trackio
}  # fmt: skip
