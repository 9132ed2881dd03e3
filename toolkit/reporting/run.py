"""Read what a run has written, wherever it is and however far it got."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.checkpoints.find import CONFIG, HYPERPARAMETERS
from toolkit.checkpoints.lock import LOCK, require_unlocked
from toolkit.checkpoints.manifest import COMPLETE, parse_manifest
from toolkit.checkpoints.store import FINAL, complete_checkpoints, step_of
from toolkit.errors import UserError, one_line
from toolkit.io.checksums import find_damage
from toolkit.io.paths import is_url, mask_url
from toolkit.io.safe_parse import MAX_BYTES, open_regular, parse_json, parse_yaml
from toolkit.reporting.events import EVENTS, parse_events
from toolkit.reporting.series import Columns, parse_metrics
from toolkit.reporting.settings import changed_settings, command_of, flatten, repeat_command

METRICS = "logs/metrics.csv"
_MAX_SAMPLES, _MAX_WARNINGS = 100, 100
Read = Callable[[str], bytes | None]  # the content of a file of the run by name; None if it is missing


@dataclass
class CheckpointFacts:
    """A checkpoint of a run. ``check`` says what was compared with its manifest, and with which result."""

    name: str
    step: int
    size: int | None
    check: str
    is_intact: bool = True


@dataclass
class RunFacts:
    """What a run has written: the input of the pages.

    Args:
        name: Short unique name of the run, for legends.
        place: Folder or URL.
        status: finished, running or stopped, with the reason if it is known.
        columns: The columns of metrics.csv, see :func:`toolkit.reporting.series.parse_metrics`.
        settings: Settings by dotted name.
        changed: Settings that differ from the defaults: {name: (value, default)}.
        command: The shell command that repeats the run; "" if the settings are unknown or came from Python.
        launches: Events of each launch: time, environment, devices, parameters.
        samples: Events of generated samples: step, prompt, text; at most the last of each step.
        warnings: Warnings and notes that the run printed.
        notes: What this report could not read.
    """

    name: str
    place: str
    status: str = "stopped"
    columns: Columns = field(default_factory=dict)
    training_command: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    command: str = ""
    model: dict[str, Any] = field(default_factory=dict)
    launches: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[CheckpointFacts] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_runs(places: list[str], verify: bool = False) -> list[RunFacts]:
    """Read several runs and give them short unique names. ``verify`` compares checksums of all checkpoints."""
    runs = [read_run(place, verify) for place in places]
    for depth in range(1, 4):
        names = ["/".join(run.place.rstrip("/").split("/")[-depth:]) for run in runs]
        if len(set(names)) == len(names):
            break
    else:
        names = [f"{name} ({number})" for number, name in enumerate(names, 1)]
    for run, name in zip(runs, names, strict=True):
        run.name = name
    return runs


def read_run(place: str | Path, verify: bool = False, status: str | None = None) -> RunFacts:
    """Read a run's folder or URL. Damaged parts become notes.

    Args:
        place: The ``out_dir`` of a run.
        verify: Compare the checksums of all checkpoints, which reads their bytes; otherwise the sizes of their files.
        status: The run's status if it is known, otherwise it is found out.

    Raises:
        UserError: There is no such run, or it cannot be reached.
    """
    is_remote = is_url(place)
    shown = mask_url(str(place)).rstrip("/") if is_remote else str(place)
    run = RunFacts(shown, shown)
    read, checkpoints = (_open_remote if is_remote else _open_local)(str(place), verify, run)
    events = list(parse_events(read(EVENTS) or b""))
    content = read(METRICS)
    run.checkpoints = list(checkpoints())
    if content is None and not events and not run.checkpoints:
        hint = "; it is a checkpoint: give the run's folder, one above" if read(CONFIG) else ""
        raise UserError(f"run_dirs {shown}: is no run: it has no {METRICS} and no complete checkpoint{hint}")
    _add_metrics(run, content)
    _add_events(run, events)
    _add_settings(run, read, events)
    is_finished = any(checkpoint.name == FINAL for checkpoint in run.checkpoints)
    run.status = status or ("running" if run.status == "running" else "finished" if is_finished else run.status)
    return run


def _open_local(place: str, verify: bool, run: RunFacts) -> tuple[Read, Callable[[], Iterator[CheckpointFacts]]]:
    folder = Path(place).expanduser()
    if not folder.is_dir():
        reason = "is a file; give the folder of a run" if folder.exists() else "no such folder; give a run's --out_dir"
        raise UserError(f"run_dirs {place}: {reason}")
    run.place = str(folder.resolve())

    def read(name: str) -> bytes | None:
        try:
            with open_regular(folder / name) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            run.notes.append(f"{name} cannot be read: {error.strerror}")
            return None

    def checkpoints() -> Iterator[CheckpointFacts]:
        for name, path in sorted(complete_checkpoints(folder), key=lambda pair: (step_of(pair[1]), pair[0])):
            sizes = {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()}
            content = read(f"{path.name}/{COMPLETE}")
            yield _check(name, step_of(path), content, sizes, partial(find_damage, path) if verify else None)

    if (folder / LOCK).exists():
        try:
            require_unlocked(folder)
        except UserError:
            run.status = "running"
    return read, checkpoints


def _open_remote(place: str, verify: bool, run: RunFacts) -> tuple[Read, Callable[[], Iterator[CheckpointFacts]]]:
    from toolkit.checkpoints.remote.checkpoints import newest_first
    from toolkit.checkpoints.remote.download import fetch_files
    from toolkit.checkpoints.remote.lease import LEASE
    from toolkit.io.paths import require_folder
    from toolkit.io.storage import Storage, StorageError

    require_folder("run_dirs", place)
    storage = Storage(place, "run_dirs")

    def read(name: str) -> bytes | None:
        try:
            return storage.read(name)
        except StorageError as error:
            raise storage.error(error) from error

    def checkpoints() -> Iterator[CheckpointFacts]:
        try:
            for found in sorted(newest_first(storage)):
                compare = partial(fetch_files, storage, found.folder, target=None) if verify else None
                yield _check(found.name, found.step, read(f"{found.folder}/{COMPLETE}"), None, compare)
        except StorageError as error:
            raise storage.error(error) from error

    if read(LEASE) is not None:
        run.status = "running"
    return read, checkpoints


def _check(
    name: str, step: int, content: bytes | None, sizes: dict[str, int] | None, compare: Callable[[Any], Any] | None
) -> CheckpointFacts:
    """Compare a checkpoint with its manifest: checksums with ``compare``, otherwise the sizes of local files."""
    try:
        files = parse_manifest(content, COMPLETE) if content else None
        if files is None:
            return CheckpointFacts(name, step, sum((sizes or {}).values()) or None, "no checksums (older version)")
        size = sum(file["size"] for file in files.values())
        damaged = sorted(compare(files)) if compare else []
        if not compare and sizes is not None:
            damaged = sorted(file for file in files if sizes.get(file) != files[file]["size"])
    except UserError as error:
        return CheckpointFacts(name, step, None, f"damaged: {one_line(error)}", False)
    if damaged:
        return CheckpointFacts(name, step, size, f"damaged: {', '.join(damaged[:3])}", False)
    check = "checksums verified" if compare else "complete, sizes match" if sizes is not None else "complete"
    return CheckpointFacts(name, step, size, check)


def _add_metrics(run: RunFacts, content: bytes | None) -> None:
    if content is None:
        run.notes.append(f"{METRICS} is missing: no curves")
        return
    run.columns, n_lost = parse_metrics(content)
    if not run.columns:
        run.notes.append(f"{METRICS} has no rows with a column step: no curves")
    elif n_lost:
        run.notes.append(f"{n_lost:,} rows of {METRICS} are torn or foreign and left out")


def _add_events(run: RunFacts, events: list[dict[str, Any]]) -> None:
    run.launches = [event for event in events if event["kind"] == "launch"]
    samples = {(e.get("step"), e.get("prompt")): e for e in events if e["kind"] == "sample"}
    run.samples = list(samples.values())[-_MAX_SAMPLES:]
    texts = [str(event.get("text")) for event in events if event["kind"] == "warning"]
    run.warnings = list(dict.fromkeys(texts))[-_MAX_WARNINGS:]
    ends = [event for event in events if event["kind"] in ("end", "launch")]
    if ends and ends[-1]["kind"] == "end" and ends[-1].get("error") and run.status != "running":
        run.status = f"stopped: {ends[-1]['error']}"


def _add_settings(run: RunFacts, read: Read, events: list[dict[str, Any]]) -> None:
    settings: Any = next((e["settings"] for e in reversed(run.launches) if isinstance(e.get("settings"), dict)), None)
    for checkpoint in reversed(run.checkpoints):
        try:
            content = read(f"{checkpoint.name}/{CONFIG}") or b""
            run.model = run.model or parse_yaml(content[: MAX_BYTES["YAML"]]) or {}
            if settings is None and (content := read(f"{checkpoint.name}/{HYPERPARAMETERS}") or b""):
                settings = parse_yaml(content[: MAX_BYTES["YAML"]])
        except ValueError as error:
            run.notes.append(f"{checkpoint.name}: settings cannot be read: {one_line(error)}")
        if settings is None and (meta := read(f"{checkpoint.name}/trainer/meta.json")):
            with suppress(ValueError, AttributeError, TypeError):
                run.settings = {k: v for k, v in parse_json(meta)["identity"].items() if k != "model_config"}
    if not isinstance(settings, dict):
        run.notes.append("the settings are not recorded, because no checkpoint was saved or the run is from Python")
        return
    run.training_command, run.settings = command_of(settings), flatten(settings)
    try:
        run.changed = changed_settings(run.training_command, run.settings)
    except (UserError, ValueError, TypeError) as error:
        run.notes.append(f"the settings cannot be compared with the defaults: {one_line(error)}")
        run.changed = {name: (value, None) for name, value in run.settings.items()}
    if all(launch.get("is_repeatable", True) for launch in run.launches):
        run.command = repeat_command(run.training_command, run.changed)


def started_at(run: RunFacts) -> str:
    """Return the time of the first recorded launch; "" if there is none."""
    times = [launch["time"] for launch in run.launches if isinstance(launch.get("time"), int | float)]
    with suppress(OverflowError, OSError, ValueError):
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(times[0])) if times else ""
    return ""
