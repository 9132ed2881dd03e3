"""Log to trackio's database in the run's folder, without network access."""

import importlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

_AXES = ("step", "tokens", "seconds")  # of metrics.csv
_REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioLogger:
    """One trackio run, named like the run's folder by default.

    trackio never replaces a step. A resumed run is therefore written again from ``rows``.

    Args:
        folder: Folder of the database.
        project, name, group: Names in trackio.
        rows: Rows of metrics.csv from earlier launches, up to the step to resume from.
    """

    def __init__(self, folder: Path, project: str, name: str, group: str | None, rows: list[dict[str, float]]) -> None:
        if remote := next(filter(os.environ.get, _REMOTE), None):
            raise ValueError(f"{remote} is set, which sends metrics away; unset it, and upload with `trackio sync`")
        os.environ["TRACKIO_DIR"] = str(folder.absolute())  # read when trackio is imported
        self._trackio = importlib.import_module("trackio")
        if (used := Path(self._trackio.TRACKIO_DIR)) != folder.absolute():
            raise ValueError(f"trackio already writes to {used} in this process; start each run in its own process")
        self._names, self._rows = {"project": project, "name": name, "group": group}, rows

    def log_hyperparams(self, values: dict[str, Any]) -> None:
        """Start the run."""
        with redirect_stdout(None), _without_account():
            with suppress(ValueError):  # no such project yet
                for run in list(self._trackio.Api().runs(self._names["project"])):
                    if run.name == self._names["name"]:
                        run.delete()
            monitors = {"auto_log_cpu": False, "auto_log_gpu": False}
            self._run = self._trackio.init(**self._names, config=values, embed=False, **monitors)
        for row in self._rows:
            self.log_metrics({k: v for k, v in row.items() if k not in _AXES and not math.isnan(v)}, int(row["step"]))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._run.log(metrics, step=step)

    def finalize(self, status: str) -> None:
        with redirect_stdout(None), suppress(RuntimeError):  # it may have ended already
            self._trackio.finish()


@contextmanager
def _without_account() -> Iterator[None]:
    """Make ``whoami`` of the hub fail: trackio asks it for the user's name even for a local run."""
    import huggingface_hub

    def whoami(*_: Any, **__: Any) -> None:
        raise OSError("not asked")

    original, huggingface_hub.whoami = huggingface_hub.whoami, whoami  # type: ignore[assignment]
    try:
        yield
    finally:
        huggingface_hub.whoami = original
