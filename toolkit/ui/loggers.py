"""Where the metrics of a run go: ``logs/metrics.csv`` always, and a logger of Lightning's where one is asked for."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.args import LogArgs
from toolkit.errors import UserError, did_you_mean
from toolkit.ui.files import file_error, write_whole

COLUMNS = (
    "step", "tokens", "loss", "learning_rate", "grad_norm", "tokens_per_sec", "mfu", "peak_memory_gb",
    "val_loss", "val_ppl", "val_bpb", "seconds",
)  # fmt: skip
"""step and tokens count from the start of the run, over all ranks; losses are nats per token; seconds of wall time."""

LOGGERS = {"csv": "", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""Names of loggers and the package that each needs."""


class MetricsCSV:
    """One row per logged step, written out at once, numbers in full precision; empty cells where there is no value."""

    def __init__(self, path: str | Path, resume_step: int | None) -> None:
        """Open the file. ``resume_step`` keeps the rows up to that step and cuts the others; None starts anew.

        Raises:
            UserError: the file cannot be written.
        """
        self.path = Path(path)
        rows = [] if resume_step is None else [row for row in read_metrics(self.path) if row["step"] <= resume_step]
        try:
            text = io.StringIO(newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows([row["_cells"] for row in rows])
            write_whole(self.path, text.getvalue().encode())
            self._file = open(self.path, "a", newline="")  # noqa: SIM115  (closed by close())
        except OSError as error:
            raise file_error(self.path, error) from error

    def write(self, row: Mapping[str, float]) -> None:
        """Append a row.

        Raises:
            UserError: the disk is full.
        """
        assert row.keys() <= set(COLUMNS), row.keys() - set(COLUMNS)
        try:
            self._file.write(",".join(repr(row[name]) if name in row else "" for name in COLUMNS) + "\n")
            self._file.flush()
        except OSError as error:
            raise file_error(self.path, error) from error

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            raise file_error(self.path, error) from error


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read metrics.csv as numbers, NaN for empty cells. A line that a kill has torn is left out."""
    path = Path(path)
    if not path.is_file():
        return []
    text = path.read_text(errors="replace")
    rows = []
    for cells in csv.reader(text[: text.rfind("\n") + 1].splitlines()[1:]):
        if len(cells) != len(COLUMNS):
            continue
        try:
            values = {name: float(cell) if cell else math.nan for name, cell in zip(COLUMNS, cells, strict=True)}
        except ValueError:
            continue
        rows.append({**values, "step": int(values["step"]), "_cells": cells})
    return rows


def make_loggers(name: str, out_dir: str | Path, log: LogArgs, hyperparameters: dict[str, Any]) -> list[Any]:
    """Build the loggers that run beside metrics.csv; none for "csv".

    Raises:
        UserError: there is no such logger, or its package is not installed.
    """
    if name not in LOGGERS:
        raise UserError(f"--logger_name {name}: no such logger{did_you_mean(name, LOGGERS)}; use {', '.join(LOGGERS)}")
    package = LOGGERS[name]
    if not package:
        return []
    if importlib.util.find_spec(package) is None:
        raise UserError(f"--logger_name {name}: needs the package {package}; run: pip install {package}")
    folder = Path(out_dir) / "logs"
    if name == "tensorboard":
        from lightning.fabric.loggers import TensorBoardLogger

        logger: Any = TensorBoardLogger(root_dir=folder, name="tensorboard", version=log.run or "")
    elif name == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        logger = WandbLogger(project=log.project, name=log.run, group=log.group, save_dir=folder)
    else:
        from lightning.pytorch.loggers import MLFlowLogger

        store = f"sqlite:///{folder / 'mlflow.db'}"
        logger = MLFlowLogger(experiment_name=log.project, run_name=log.run, tracking_uri=store)
    logger.log_hyperparams(hyperparameters)
    return [logger]


def log_metrics(loggers: list[Any], metrics: Mapping[str, float], step: int) -> None:
    for logger in loggers:
        logger.log_metrics(dict(metrics), step)
