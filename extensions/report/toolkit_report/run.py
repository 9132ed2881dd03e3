"""Read what a run has written, wherever it is and however far it got."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.checkpoints.find import CONFIG, HYPERPARAMETERS
from toolkit.checkpoints.lock import LOCK, require_unlocked
from toolkit.checkpoints.manifest import COMPLETE, parse_manifest
from toolkit.checkpoints.remote.checkpoints import newest_first
from toolkit.checkpoints.remote.lease import LEASE
from toolkit.checkpoints.store import FINAL, complete_checkpoints, step_of
from toolkit.errors import UserError, join_first, one_line
from toolkit.io.paths import is_url, mask_url, require_folder
from toolkit.io.safe_parse import MAX_BYTES, parse_yaml, read_bounded
from toolkit.io.storage import Storage, StorageError
from toolkit.ui.energy import describe_energy
from toolkit.ui.events import EVENTS, parse_events
from toolkit_report.series import MAX_COLUMNS, Columns, parse_metrics
from toolkit_report.settings import changed_settings, command_of, defaults_of, flatten, repeat_command

METRICS = "logs/metrics.csv"
_MAX_EVENTS = 100  # samples and warnings of a page
_Read = Callable[[str], bytes | None]  # a file's content by its name in the run's folder; None if it is missing


class Checkpoint(NamedTuple):
    """A checkpoint of a run. ``check`` says whether its files match its manifest."""

    name: str
    step: int
    size: int
    check: str


@dataclass
class RunFacts:
    """What a run has written: the input of the report.

    Args:
        name: Short unique name, for legends.
        place: Folder or URL.
        status: finished, running or stopped, with the reason if it is known.
        columns: The columns of metrics.csv, see :func:`toolkit_report.series.parse_metrics`.
        settings: Settings by dotted name.
        changed: Settings that differ from the defaults: {name: (value, default)}.
        training_command: pretrain, finetune_full or finetune_lora; "" if the settings are unknown.
        command: The shell command that repeats the run; "" if the settings are unknown or came from Python.
        launches: An event of each launch, see ``MetricsFile.on_train_start``.
        samples: Events of generated samples by step: step, prompt, text.
        warnings: Warnings and notes that the run printed.
        notes: What could not be read.
        energy: See :func:`toolkit.ui.energy.describe_energy`; "" if no launch is recorded.
    """

    name: str
    place: str
    status: str = "stopped"
    columns: Columns = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    training_command: str = ""
    command: str = ""
    launches: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    energy: str = ""

    @property
    def launch(self) -> dict[str, Any]:
        """The last launch; empty if none is recorded."""
        return self.launches[-1] if self.launches else {}


def read_runs(places: Iterable[str]) -> list[RunFacts]:
    """Read several runs and give them short unique names."""
    runs = [read_run(place) for place in places]
    for depth in range(1, 9):
        for run in runs:
            run.name = "/".join(run.place.split("/")[-depth:])
        if len({run.name for run in runs}) == len(runs):
            break
    return runs


def read_run(place: str | Path, status: str | None = None) -> RunFacts:
    """Read a run's folder or URL. Damaged parts become notes.

    Args:
        place: The ``out_dir`` of a run.
        status: The run's status, if it is known.

    Raises:
        UserError: There is no such run, or it cannot be reached.
    """
    run, read = (_open_remote if is_url(place) else _open_local)(str(place))
    events = list(parse_events(read(EVENTS) or b""))
    metrics = read(METRICS)
    if metrics is None and not events and not run.checkpoints:
        if read(CONFIG):
            raise UserError(f"run_dirs {run.place}: is a checkpoint; give the run's folder, one above")
        raise UserError(f"run_dirs {run.place}: is no run: it has no {METRICS} and no complete checkpoint")
    if metrics is None:
        run.notes.append(f"{METRICS} is missing: no curves")
    else:
        run.columns, n_lost = parse_metrics(metrics)
        if not run.columns:
            unread = f"has no rows with a column step, or more than {MAX_COLUMNS:,} columns: no curves"
            run.notes.append(f"{METRICS} {unread}")
        elif n_lost:
            run.notes.append(f"{n_lost:,} rows of {METRICS} are torn or foreign and left out")
    run.launches = [event for event in events if event["kind"] == "launch"]
    run.energy = describe_energy(events) if run.launches else ""
    samples = {str((event.get("step"), event.get("prompt"))): event for event in events if event["kind"] == "sample"}
    run.samples = list(samples.values())[-_MAX_EVENTS:]
    texts = [str(event.get("text")) for event in events if event["kind"] == "warning"]
    run.warnings = list(dict.fromkeys(texts))[-_MAX_EVENTS:]
    errors = [event.get("error") for event in events if event["kind"] in ("launch", "end")]
    if errors and errors[-1] and run.status == "stopped":
        run.status = f"stopped: {errors[-1]}"
    _add_settings(run, read)
    if status or any(checkpoint.name == FINAL for checkpoint in run.checkpoints):
        run.status = status or "finished"
    return run


def _open_local(place: str) -> tuple[RunFacts, _Read]:
    folder = Path(place)
    if not folder.is_dir():
        reason = "is a file; give the folder of a run" if folder.exists() else "no such folder; give a run's --out_dir"
        raise UserError(f"run_dirs {place}: {reason}")
    run = RunFacts(folder.resolve().name, str(folder.resolve()))

    def read(name: str) -> bytes | None:
        try:
            return read_bounded(folder / name, "log")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            run.notes.append(f"{name} cannot be read: {getattr(error, 'strerror', error)}")
            return None

    try:
        checkpoints = sorted(complete_checkpoints(folder), key=lambda pair: (step_of(pair[1]), pair[0]))
        if (folder / LOCK).exists():
            require_unlocked(folder)
    except UserError:
        run.status = "running"
    except OSError as error:
        raise UserError(f"run_dirs {place}: cannot be read: {error.strerror}") from error
    for name, path in checkpoints:
        with suppress(FileNotFoundError):  # a run in progress deletes old checkpoints
            sizes = {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()}
            checkpoint = _checkpoint(name, step_of(path), read(f"{path.name}/{COMPLETE}"), sizes)
            run.checkpoints += [checkpoint] if path.exists() else []
    return run, read


def _open_remote(place: str) -> tuple[RunFacts, _Read]:
    require_folder("run_dirs", place)
    storage, shown = Storage(place, "run_dirs"), mask_url(place).rstrip("/")
    run = RunFacts(shown.rpartition("/")[2], shown)

    def read(name: str) -> bytes | None:
        try:
            return storage.read(name)
        except StorageError as error:
            raise storage.error(error) from error

    try:
        checkpoints = sorted(newest_first(storage))
    except StorageError as error:
        raise storage.error(error) from error
    run.checkpoints = [_checkpoint(c.name, c.step, read(f"{c.folder}/{COMPLETE}"), None) for c in checkpoints]
    if read(LEASE) is not None:
        run.status = "running, or killed"
    return run, read


def _checkpoint(name: str, step: int, manifest: bytes | None, sizes: Mapping[str, int] | None) -> Checkpoint:
    """Compare the sizes of a checkpoint's files with its manifest. ``sizes`` is None on remote storage."""
    files, check = {}, "complete, without checksums"
    if manifest:
        try:
            files = parse_manifest(manifest, COMPLETE)
            wrong = sorted(file for file in files if sizes is not None and sizes.get(file) != files[file]["size"])
            good = "complete" if sizes is None else "complete, sizes match"
            check = f"damaged: {', '.join(wrong[:3])}" if wrong else good
        except UserError as error:
            check = one_line(error)
    size = sum(file["size"] for file in files.values()) or sum((sizes or {}).values())
    return Checkpoint(name, step, size, check)


def _add_settings(run: RunFacts, read: _Read) -> None:
    """Add the settings of the last launch, or of the last checkpoint of an older version's run."""
    settings = run.launch.get("settings")
    if settings is None and run.checkpoints:
        try:
            content = read(f"{run.checkpoints[-1].name}/{HYPERPARAMETERS}") or b""
            settings = parse_yaml(content[: MAX_BYTES["YAML"]])
        except ValueError as error:
            run.notes.append(f"{HYPERPARAMETERS} cannot be read: {one_line(error)}")
    if not isinstance(settings, dict):
        run.notes.append("the settings are not recorded")
        return
    run.training_command = command_of(settings)
    defaults: Mapping[str, Any] = {}
    try:
        run.settings = flatten(run.training_command, settings)
        defaults = defaults_of(run.training_command, run.settings)
        run.changed = changed_settings(defaults, run.settings)
    except (UserError, ValueError, TypeError) as error:
        run.notes.append(f"the settings cannot be compared with the defaults: {one_line(error)}")
        run.changed = {name: (value, None) for name, value in run.settings.items()}
    if run.launch.get("is_repeatable", True):
        changed = dict(run.changed)
        if out_dir := run.settings.get("out_dir"):  # the command would refuse a used folder
            changed["out_dir"] = (f"{out_dir}-repeated", None)
        if unknown := [name for name in changed if name not in defaults]:
            run.notes.append(f"not in the command, because they are no options: {join_first(unknown)}")
        run.command = repeat_command(run.training_command, {k: v for k, v in changed.items() if k in defaults})
