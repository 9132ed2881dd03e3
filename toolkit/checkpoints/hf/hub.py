"""Download a model from the Hugging Face hub: only allow-listed files, pinned to one commit (S4)."""

import glob
import shutil
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch

from toolkit.checkpoints.hf.import_hf import import_hf, read_hf_config
from toolkit.checkpoints.hf.origin import ORIGIN_FILE
from toolkit.checkpoints.hf.reader import ADAPTER, CONFIG, INDEX, SINGLE, no_weights_hint, quantized_bits, read_index
from toolkit.checkpoints.hf.sums import find_changed, write_sums
from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.store import require_new_folder
from toolkit.data.hub_errors import hub_errors, require_repo_id
from toolkit.data.tokenizer import FILE_PATTERNS, Tokenizer
from toolkit.errors import UserError
from toolkit.io.safe_parse import read_json_object, write_yaml

TIMEOUT = 30  # seconds
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


class Repository(NamedTuple):
    """A hub repository at one commit."""

    repo_id: str
    revision: str
    """The requested branch, tag or commit."""
    commit: str
    sizes: dict[str, int]
    """File size in bytes by path; 0 if unknown."""

    def error(self, reason: str) -> UserError:
        return UserError(f"repo_id {self.repo_id}: {reason}")

    def fetch(self, names: list[str], folder: Path, hint: str = "") -> None:
        """Download files that a folder lacks, and verify them (S7). ``hint`` is appended to error messages."""
        from huggingface_hub import snapshot_download

        with hub_errors(self.repo_id, self.revision, hint):
            patterns = [glob.escape(name) for name in names]
            snapshot_download(self.repo_id, revision=self.commit, local_dir=folder, allow_patterns=patterns)
            # Without network access, snapshot_download only warns and returns an existing folder.
            if missing := self.missing(names, folder):
                raise OSError(f"{missing[0]} is incomplete")
            if changed := find_changed(folder):
                for name in changed:
                    (folder / name).unlink()
                raise OSError(f"{changed[0]} differs from the hub's checksum and was deleted")

    def missing(self, names: list[str], folder: Path) -> list[str]:
        """Return the files that a folder lacks or has only in part."""
        files = {name: folder / name for name in names}
        return [n for n, file in files.items() if not file.is_file() or self.sizes[n] not in (0, file.stat().st_size)]


def download(
    repo_id: str,
    out_dir: Path,
    revision: str = "main",
    dtype: torch.dtype | None = None,
    convert: bool = True,
    tokenizer_only: bool = False,
) -> list[str]:
    """Download a model from the hub to a model folder. Record the commit in ``download.yaml`` and show progress.

    Files are downloaded to ``.download-NAME`` in out_dir's parent. After an interruption, the next call downloads only
    the missing files.

    Args:
        repo_id: Hub repository, ``organization/name`` or ``name``.
        out_dir: The new folder; an existing one must be empty.
        revision: A branch, a tag or a commit.
        dtype: Dtype of the weights; unchanged by default.
        convert: If false, keep the downloaded files as a Hugging Face folder.
        tokenizer_only: Download only tokenizer files.

    Returns:
        Conversion notes for the user.
    """
    require_new_folder(out_dir)
    repository = _look_up(repo_id, revision)
    staging = out_dir.parent / f".download-{out_dir.resolve().name}"
    folder = staging / repository.commit
    convert, notes = convert and not tokenizer_only, list[str]()
    with tempfile.TemporaryDirectory() as preview:
        names = _select_tokenizer(repository) if tokenizer_only else _select_files(repository, Path(preview))
        size_ratio = _conversion_size_ratio(Path(preview), dtype) if convert else 0.0
    _require_disk_space(repository, names, folder, size_ratio, out_dir)
    with exclusive_lock(staging):
        size = sum(repository.sizes[name] for name in names)
        print(f"downloading {repo_id} at commit {repository.commit}: {len(names)} files, {size:,} bytes", flush=True)
        repository.fetch(
            names, folder, f"; complete files remain in {staging}; run the same command again to download the rest"
        )
        write_yaml(folder / ORIGIN_FILE, {"repo_id": repo_id, "revision": revision, "commit": repository.commit})
        try:
            if tokenizer_only:
                Tokenizer.load(folder, f"repo_id {repo_id}:")
            if convert:
                print(f"converting {repo_id} to {out_dir}")
                notes += import_hf(folder, out_dir, dtype, verify=False)
            else:
                write_sums(folder)
                shutil.rmtree(folder / ".cache", ignore_errors=True)  # metadata of huggingface_hub
                folder.replace(out_dir)
        except UserError as error:
            raise UserError(f"{error}; the downloaded files remain in {staging}") from error
        shutil.rmtree(staging, ignore_errors=True)
    return notes


def _look_up(repo_id: str, revision: str) -> Repository:
    from huggingface_hub import HfApi

    if repo_id == "list":
        raise UserError(
            "repo_id list: give a model name on the hub, such as HuggingFaceTB/SmolLM2-135M-Instruct; "
            "`toolkit pretrain list` prints the named architectures"
        )
    require_repo_id(repo_id, "repo_id")
    with hub_errors(repo_id, revision):
        info = HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=TIMEOUT)
        if not info.sha:
            raise ValueError("no commit")
    return Repository(repo_id, revision, info.sha, {file.rfilename: file.size or 0 for file in info.siblings or ()})


def _select_tokenizer(repository: Repository) -> list[str]:
    names = sorted(filter(_is_tokenizer_file, repository.sizes))
    if "tokenizer.json" not in names:
        others = f" ({', '.join(names)} alone is not supported)" if names else ""
        raise repository.error(f"holds no tokenizer.json{others}; try another repository")
    return names


def _select_files(repository: Repository, folder: Path) -> list[str]:
    """Return the names of files to download. Downloads config.json and the weight index to ``folder``."""
    sizes = repository.sizes
    if CONFIG not in sizes:
        raise repository.error(f"holds no {CONFIG}; give the repository of a Hugging Face model")
    weights = next((name for name in (SINGLE, INDEX) if name in sizes), None)
    repository.fetch([CONFIG, INDEX] if weights == INDEX else [CONFIG], folder)
    try:
        read_hf_config(folder, name=repository.repo_id)
        shards = sorted(set(read_index(folder / INDEX).values())) if weights == INDEX else []
    except UserError as error:
        raise repository.error(str(error).replace(f"hf_dir {folder}: ", "").replace(f"{folder}/", "")) from error
    if weights is None:
        raise repository.error(_missing_weights_hint(repository))
    if missing := [name for name in shards if name not in sizes]:
        raise repository.error(f"{INDEX}: {missing[0]!r:.200} is not in the repository; try another --revision")
    return [CONFIG, *sorted(filter(_is_tokenizer_file, sizes)), weights, *shards]


def _is_tokenizer_file(name: str) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch(name, pattern) for pattern in FILE_PATTERNS)


def _missing_weights_hint(repository: Repository) -> str:
    if pickled := sorted(name for name in repository.sizes if fnmatch(name, "pytorch_model*.bin*")):
        return (
            f"holds {pickled[0]}, a format that can run code, and no {SINGLE}; look for a --revision with "
            f"safetensors, or fetch it with `hf download {repository.repo_id} --local-dir hf_dir` and convert it with "
            "toolkit convert_from_hf, which does not run code"
        )
    return no_weights_hint(ADAPTER in repository.sizes)


def _conversion_size_ratio(folder: Path, dtype: torch.dtype | None) -> float:
    """Return the size of converted weights relative to the hub's, based on the dtype in config.json."""
    values = read_json_object(folder / CONFIG)
    if (bits := quantized_bits(values)) is not None:
        return (2 if dtype is None else dtype.itemsize) * 8 / bits
    stored = _ITEMSIZE.get(str(values.get("dtype") or values.get("torch_dtype")))
    return dtype.itemsize / stored if dtype is not None and stored else 1.0


def _require_disk_space(repo: Repository, names: list[str], folder: Path, size_ratio: float, out_dir: Path) -> None:
    """Raise UserError unless the download and converted weights (``size_ratio`` times as large) fit on disk."""
    weights = sum(repo.sizes[name] for name in names if name.endswith(".safetensors"))
    needed = sum(repo.sizes[name] for name in repo.missing(names, folder)) + int(size_ratio * weights)
    free = shutil.disk_usage(next(parent for parent in folder.absolute().parents if parent.is_dir())).free
    if needed > free:
        raise UserError(
            f"--out_dir {out_dir}: downloading{' and converting' if size_ratio else ''} {repo.repo_id} needs "
            f"{needed:,} bytes of disk space, but only {free:,} are free; free some space or give another folder"
        )
