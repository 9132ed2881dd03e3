"""In from the Hugging Face hub: the few files of a repository that make a model, at one commit (S4)."""

from __future__ import annotations

import glob
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from toolkit.checkpoints.hf_reader import CONFIG, INDEX, SINGLE, quantised_bits, read_json
from toolkit.checkpoints.import_hf import import_hf, read_hf_config, write_record
from toolkit.checkpoints.lock import exclusive
from toolkit.checkpoints.store import full_disk, require_new_folder
from toolkit.data.tokenizer import FILE_PATTERNS
from toolkit.errors import UserError

if TYPE_CHECKING:
    import torch

_TIMEOUT = 30  # seconds
_HEARTBEAT = 10.0  # seconds between two lines of a download
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Snapshot(NamedTuple):
    """A repository at one commit."""

    repo_id: str
    revision: str  # what was asked for: a branch, a tag or a commit
    commit: str
    sizes: dict[str, int]  # in bytes, by path


def download(
    repo_id: str,
    out_dir: str | Path,
    revision: str = "main",
    dtype: torch.dtype | None = None,
    convert: bool = True,
    report: Callable[[str], None] = print,
) -> list[str]:
    """Write the model of a repository as a model folder, with the commit that it is of in ``download.yaml``.

    The files of the hub lie in ``.download-NAME`` beside out_dir until they are converted. When something breaks off,
    those that are whole stay there and the next call fetches the others, from their beginning.

    Args:
        repo_id: ``organisation/name``, or a name alone.
        out_dir: The new folder; one that is there must be empty.
        revision: A branch, a tag or a commit.
        dtype: Type of the weights; as they are when not given.
        convert: False leaves the files of the hub as they are: a Hugging Face folder.
        report: Takes what happens, in lines.

    Returns:
        What the user should know of the conversion, in lines.

    Raises:
        UserError: there is no such repository or revision, or no access to it, or no network; it holds no safetensors,
            or a model that is not supported, which is found out before its weights are fetched; the disk is too small.
    """
    out_dir = Path(out_dir)
    require_new_folder(out_dir)
    snapshot = _look_up(repo_id, revision)
    place = out_dir.parent / f".download-{out_dir.resolve().name}"
    folder = place / snapshot.commit
    with tempfile.TemporaryDirectory() as looked_at:
        names = _choose(snapshot, Path(looked_at))
        growth = _growth(Path(looked_at), dtype) if convert else 0.0
    _require_room(snapshot, names, folder, growth)
    with exclusive(place):
        _drop_other_commits(place, snapshot.commit)
        size = sum(snapshot.sizes[name] for name in names)
        report(f"downloading {repo_id} at commit {snapshot.commit}: {len(names)} files, {size:,} bytes")
        after = f"; whole files are kept in {place}, the same command fetches the others"
        _fetch(snapshot, names, folder, after, report)
        record = {"repo_id": repo_id, "revision": revision, "commit": snapshot.commit}
        write_record(folder, record)
        if convert:
            report(f"converting it to {out_dir}")
        try:
            notes = import_hf(folder, out_dir, dtype) if convert else _move(folder, out_dir)
        except UserError as error:
            raise UserError(f"{error}; what was downloaded is kept in {place}") from error
        shutil.rmtree(place, ignore_errors=True)
    return notes


def _look_up(repo_id: str, revision: str) -> Snapshot:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if repo_id == "list":
        raise UserError(
            "repo_id list: give the name of a model on the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct; "
            "`toolkit pretrain list` prints the named architectures"
        )
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repo_id {repo_id}: not a name of the hub's; give organisation/name") from error
    with _explained(repo_id, revision):
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT)
        if not info.sha:
            raise ValueError("no commit")
    return Snapshot(repo_id, revision, info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()})


def _choose(snapshot: Snapshot, folder: Path) -> list[str]:
    """Return the files to fetch: those that a conversion reads. Only small ones are fetched, into ``folder``."""
    sizes, where = snapshot.sizes, f"repo_id {snapshot.repo_id}"
    if CONFIG not in sizes:
        raise UserError(f"{where}: holds no {CONFIG}; give the repository of a Hugging Face model")
    _fetch(snapshot, [CONFIG], folder)
    try:
        read_hf_config(folder, name=snapshot.repo_id)
    except UserError as error:
        raise UserError(f"{where}: {str(error).replace(f'hf_dir {folder}: ', '').replace(f'{folder}/', '')}") from error
    if SINGLE in sizes:
        weights = [SINGLE]
    elif INDEX in sizes:
        weights = [INDEX, *_shards(snapshot, folder)]
    else:
        raise UserError(f"{where}: {_instead_of_safetensors(snapshot)}")
    return [CONFIG, *sorted(name for name in sizes if _is_tokenizers(name)), *weights]


def _is_tokenizers(name: str) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in FILE_PATTERNS)


def _shards(snapshot: Snapshot, folder: Path) -> list[str]:
    _fetch(snapshot, [INDEX], folder)
    where = f"repo_id {snapshot.repo_id}: {INDEX}"
    try:
        shards = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        wrong = next((name for name in shards if "/" in name or not name.endswith(".safetensors")), None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: holds no weight_map of names to files; try another --revision") from error
    if wrong:
        raise UserError(f"{where}: points to {wrong!r:.200}, which is no safetensors file beside it")
    if missing := [name for name in shards if name not in snapshot.sizes]:
        raise UserError(f"{where}: {missing[0]!r:.200} is not in the repository; try another --revision")
    return shards


def _instead_of_safetensors(snapshot: Snapshot) -> str:
    if pickled := sorted(name for name in snapshot.sizes if fnmatch(name, "pytorch_model*.bin*")):
        return (
            f"holds {pickled[0]}, a kind of file that can run code, and no {SINGLE}; look for a --revision with "
            f"safetensors, or fetch it with `hf download {snapshot.repo_id} --local-dir hf_dir` and read it with "
            "toolkit convert_from_hf, which runs none"
        )
    if "adapter_model.safetensors" in snapshot.sizes:
        return "holds an adapter, not a whole model; give the repository of its base model"
    return f"holds neither {SINGLE} nor {INDEX}; give the repository of a Hugging Face model"


def _growth(folder: Path, dtype: torch.dtype | None) -> float:
    """By how much the converted weights are larger than those of the hub, by what config.json says of their type."""
    values = read_json(folder / CONFIG)
    if (bits := quantised_bits(values)) is not None:
        return (2 if dtype is None else dtype.itemsize) * 8 / bits
    stored = _ITEMSIZE.get(str(values.get("dtype") or values.get("torch_dtype")))
    return dtype.itemsize / stored if dtype is not None and stored else 1.0


def _require_room(snapshot: Snapshot, names: list[str], folder: Path, growth: float) -> None:
    """``growth`` times the weights are written beside them; 0 when nothing is."""
    weights = sum(snapshot.sizes[name] for name in names if name.endswith(".safetensors"))
    here = sum(snapshot.sizes[name] for name in names if _is_whole(snapshot, name, folder))
    needed = sum(snapshot.sizes[name] for name in names) - here + int(growth * weights)
    disk = next(parent for parent in folder.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(disk).free
    if needed > free:
        raise UserError(
            f"--out_dir {folder.parent.parent}: {snapshot.repo_id} needs {needed:,} bytes of disk there to download"
            f"{' and convert it' if growth else ' it'}, and {free:,} are free; free some space or give another folder"
        )


def _is_whole(snapshot: Snapshot, name: str, folder: Path) -> bool:
    file = folder / name
    return file.is_file() and snapshot.sizes[name] in (0, file.stat().st_size)  # 0: not known


def _drop_other_commits(place: Path, commit: str) -> None:
    """Delete what an earlier download of another revision left, of which nothing may come into this one."""
    for path in place.iterdir():
        if path.is_dir() and path.name != commit:
            shutil.rmtree(path)


def _fetch(
    snapshot: Snapshot, names: list[str], folder: Path, after: str = "", report: Callable[[str], None] | None = None
) -> None:
    """Fetch files into a folder; without ``report`` in silence."""
    from huggingface_hub import snapshot_download

    size = sum(snapshot.sizes[name] for name in names)
    with _explained(snapshot.repo_id, snapshot.revision, after), _progress(folder, size, report) as tqdm_class:
        snapshot_download(
            snapshot.repo_id,
            revision=snapshot.commit,
            local_dir=folder,
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=tqdm_class,
        )
        # Without a network it returns a folder that is there with no more than a warning.
        if missing := [name for name in names if not _is_whole(snapshot, name, folder)]:
            raise OSError(f"{missing[0]} has not come whole")


@contextmanager
def _progress(folder: Path, size: int, report: Callable[[str], None] | None) -> Iterator[type | None]:
    """Give the class of the library's bars: its own on a terminal; elsewhere one that draws nothing, and a line with
    the bytes in ``folder`` is reported now and then."""
    if report is not None and sys.stderr.isatty():
        yield None
        return
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | {"disable": True}))

    is_over = threading.Event()

    def report_bytes() -> None:
        while report is not None and not is_over.wait(_HEARTBEAT):
            with suppress(OSError):  # a file may be renamed meanwhile
                here = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
                report(f"downloaded {min(here, size):,} of {size:,} bytes")

    reporter = threading.Thread(target=report_bytes, daemon=True)
    reporter.start()
    try:
        yield Silent
    finally:
        is_over.set()
        reporter.join()


def _move(folder: Path, out_dir: Path) -> list[str]:
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the hub's own notes
    folder.replace(out_dir)
    return []


@contextmanager
def _explained(repo_id: str, revision: str, after: str = "") -> Iterator[None]:
    """Turn what the hub's library raises into one line."""
    from huggingface_hub.errors import HfHubHTTPError

    # The bases are the errors of its HTTP library, which is another one in each of its major versions. RuntimeError is
    # what the library for large files raises, the rest comes of an answer that is not a hub's.
    errors = (HfHubHTTPError, *HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError, KeyError, TypeError)
    try:
        yield
    except UserError:
        raise
    except errors as error:
        raise UserError(_explain(error, repo_id, revision) + after) from error


def _explain(error: BaseException, repo_id: str, revision: str) -> str:
    from huggingface_hub import errors

    where, hub = f"repo_id {repo_id}", _endpoint()
    causes = [error, *_causes(error)]
    status = next((e.response.status_code for e in causes if isinstance(e, errors.HfHubHTTPError)), None)
    login = "log in with `hf auth login` or set HF_TOKEN"
    if any(isinstance(e, errors.GatedRepoError) for e in causes):
        return f"{where}: is gated; accept its licence at {hub}/{repo_id}, then {login} to a token of that account"
    if any(isinstance(e, errors.RepositoryNotFoundError) for e in causes):
        return f"{where}: no such model at {hub}, or a private one; check the name, or {login}"
    if any(isinstance(e, errors.RevisionNotFoundError) for e in causes):
        return f"--revision {revision}: no such branch, tag or commit of {repo_id}; see {hub}/{repo_id}/tree/main"
    if status in (401, 403):
        return f"{where}: {hub} refuses the token (status {status}); {login} to one that may read it"
    if any(isinstance(e, errors.OfflineModeIsEnabled) for e in causes):
        return f"{where}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, which forbids every download; unset it"
    if reason := full_disk(error):
        return f"{where}: {reason}; free some space"
    if isinstance(error, (KeyError, TypeError, ValueError)) and status is None:
        return f"{where}: {hub} does not answer as a hub does; check HF_ENDPOINT"
    said = f"it answers with status {status}" if status else " ".join(str(causes[-1]).split())[:200]
    return f"{where}: no download from {hub} ({said}); check the network, or HF_ENDPOINT where you use a mirror"


def _causes(error: BaseException) -> Iterator[BaseException]:
    while error := error.__cause__ or error.__context__:
        yield error


def _endpoint() -> str:
    """The hub's address, for people: without a password that may stand in it."""
    from huggingface_hub import constants

    url = urlsplit(constants.ENDPOINT)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
