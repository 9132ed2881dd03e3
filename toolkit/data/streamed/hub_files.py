"""List the files of a Hugging Face dataset at one commit, by subset and split.

The README's ``configs`` name the subsets. Without them, splits are recognized by file names, as in the datasets
library (https://huggingface.co/docs/hub/datasets-file-names-and-splits). No repository code is run.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

from huggingface_hub import HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import EntryNotFoundError

from toolkit.data.base import Values
from toolkit.data.hub_errors import hub_errors, require_repo_id
from toolkit.errors import UserError, join_first
from toolkit.io.safe_parse import parse_yaml, read_bounded
from toolkit.io.source_files import SourceFile, SourceFiles, is_supported, list_path, require_text
from toolkit.io.threads import call_with_timeout

_TIMEOUT = 30  # seconds
_LISTING_TIMEOUT = 300  # seconds; large repositories have many pages, which the client requests without a timeout
_USE_PATH = "list its files with --data.path hf://datasets/..."
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_URL = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?(/(?P<files>.+))?")


class Repository(NamedTuple):
    """A dataset repository, pinned to one commit."""

    repo_id: str
    revision: str
    commit: str


def open_repository(repo_id: str, revision: str) -> Repository:
    """Resolve a branch, tag or commit to a commit hash."""
    require_repo_id(repo_id, "--data.repo_id")
    with hub_errors(repo_id, revision, kind="dataset"):
        commit = HfApi().dataset_info(repo_id, revision=revision, timeout=_TIMEOUT).sha
        if not commit:
            raise ValueError("no commit")
    return Repository(repo_id, revision, commit)


def open_url(url: str, where: str) -> tuple[Repository, str]:
    """Return the repository of ``hf://datasets/ORGANIZATION/NAME[@REVISION][/FILES]``, and FILES or ""."""
    if (match := _URL.fullmatch(url)) is None:
        raise UserError(f"{where}: must be hf://datasets/ORGANIZATION/NAME[@REVISION]/FILES")
    return open_repository(match["repo"], (match["revision"] or "main").replace("%2F", "/")), match["files"] or ""


def list_split(repository: Repository, subset: str | None, split: str) -> SourceFiles:
    """List the files of a split, by the README's configs or by words in file names."""
    config = _config(repository, subset)
    folder, patterns = config.get("data_dir"), config.get("data_files")
    prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/.") else ""
    globs = {} if patterns is None else _globs_by_split(patterns, repository)
    by_name = _split_by_name(_find(repository, [f"{prefix}**"])) if patterns is None else {}
    if split not in (splits := sorted([*globs, *by_name])):
        has = f"it has {join_first(splits)}" if splits else "it has no files of a supported format"
        raise UserError(f"--data.split {split}: {repository.repo_id} has no such split; {has}")
    files = by_name.get(split) or _find(repository, [prefix + glob for glob in globs[split]])
    where = f"--data.repo_id {repository.repo_id}"
    if not files:
        raise UserError(f"{where}: split {split} has no files; give another --data.split")
    return require_text(files, where)


def list_url(url: str, option: str) -> SourceFiles:
    """List the files of ``hf://datasets/ORGANIZATION/NAME[@REVISION]/GLOB``, or of a path or URL on other storage, see
    :func:`~toolkit.io.source_files.list_path`."""
    if not url.startswith("hf://"):
        return list_path(url, option)
    where = f"--data.{option} {url}"
    repository, pattern = open_url(url, where)
    if not (files := _find(repository, [pattern])):
        raise UserError(f"{where}: no file matches; check the pattern")
    return require_text(files, where)


def _config(repository: Repository, subset: str | None) -> Values:
    """Return a subset's entry in the README, or {} if the README names no files."""
    repo_id, path = repository.repo_id, None
    with hub_errors(repo_id, repository.revision, kind="dataset"), suppress(EntryNotFoundError):
        options: Values = {"repo_type": "dataset", "revision": repository.commit, "etag_timeout": _TIMEOUT}
        path = hf_hub_download(repo_id, "README.md", **options)
    try:
        text = "" if path is None else read_bounded(path).decode(errors="replace")
        header = re.match(r"\s*---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        entries = (parse_yaml(header[1]) or {}).get("configs") or [] if header else []
        configs = {str(e.get("config_name", "default")): e for e in entries if "data_files" in e or "data_dir" in e}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"--data.repo_id {repo_id}: the YAML of its README cannot be read: {error}; {_USE_PATH}"
        ) from error
    if not configs and subset is None:
        return {}
    if not configs:
        raise UserError(f"--data.subset {subset}: {repo_id} has no subsets; remove it")
    name = subset
    if name is None:
        defaults = [n for n, c in configs.items() if n == "default" or c.get("default") is True]
        name = defaults[0] if defaults else next(iter(configs)) if len(configs) == 1 else None
    if name not in configs:
        problem = "must be given" if subset is None else f"{subset}: no such subset"
        raise UserError(f"--data.subset {problem}; {repo_id} has {join_first(sorted(configs), 20)}")
    return configs[name]


def _globs_by_split(files: Any, repository: Repository) -> dict[str, list[str]]:
    """Normalize ``data_files`` (a glob, a list of globs, or splits with globs) to {split: globs}."""
    patterns: dict[str, list[str]] = {}
    try:
        if all(isinstance(item, str) for item in files) and not isinstance(files, dict):
            files = {"train": files}
        pairs = files.items() if isinstance(files, dict) else [(item["split"], item["path"]) for item in files]
        for split, globs in pairs:
            patterns.setdefault(str(split), []).extend([globs] if isinstance(globs, str) else globs)
        return patterns
    except (TypeError, KeyError) as error:
        problem = "the data_files of its README are malformed"
        raise UserError(f"--data.repo_id {repository.repo_id}: {problem}; {_USE_PATH}") from error


def _split_by_name(files: SourceFiles) -> dict[str, SourceFiles]:
    """Group files by split, from words in file names. Without such words, all files are training files."""
    supported = [file for file in files if is_supported(file.name)]
    files_by_split: dict[str, SourceFiles] = {}
    for split, words in _SPLITS.items():
        pattern = re.compile(rf"(^|[-._ /0-9])({'|'.join(words)})([-._ /0-9]|$)", re.IGNORECASE)
        if matching := [file for file in supported if pattern.search(file.name)]:
            files_by_split[split] = matching
    return files_by_split or ({"train": supported} if supported else {})


def _find(repository: Repository, globs: Sequence[str]) -> SourceFiles:
    """Return the files that match any glob, once each and sorted by name.

    Globs match as in the datasets library: ``*`` within a folder, ``**`` across folders.
    """
    root = f"datasets/{repository.repo_id}@{repository.commit}"

    def find() -> dict[str, Values]:
        fs: Any = HfFileSystem(skip_instance_cache=True)
        infos: dict[str, Values] = {}
        for glob in globs:
            infos |= fs.glob(f"{root}/{glob.removeprefix('./')}", detail=True, expand_info=False)
        return infos

    with hub_errors(repository.repo_id, repository.revision, kind="dataset"):
        infos = sorted(call_with_timeout(_LISTING_TIMEOUT, find).items())
    return [
        SourceFile(f"hf://{root}/{quote(name)}", name, info["size"], info["blob_id"])
        for name, info in ((path.removeprefix(f"{root}/"), info) for path, info in infos)
        if info["type"] == "file"
    ]
