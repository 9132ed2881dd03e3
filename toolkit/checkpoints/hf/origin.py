"""Record where a model was imported from: a repository of the Hugging Face hub, or a folder."""

from pathlib import Path

import yaml

from toolkit.checkpoints.hf.reader import CONFIG
from toolkit.io.safe_parse import read_yaml

ORIGIN_FILE = "download.yaml"  # records the model's origin: a hub repository and commit, or a folder


def write_origin(folder: Path, origin: dict[str, str]) -> None:
    """Write ``download.yaml`` with a model's origin: repo_id, revision and commit, or hf_dir."""
    (folder / ORIGIN_FILE).write_text(yaml.safe_dump(origin, sort_keys=False, allow_unicode=True), encoding="utf-8")


def read_origin(folder: Path) -> tuple[str, str | None] | None:
    """Return (hub name or Hugging Face folder, revision) that a model was imported from.

    The revision is None for ``main`` and for folders. Returns None if no origin is recorded or the folder no longer
    exists.
    """
    try:
        origin = read_yaml(folder / ORIGIN_FILE)
        repo_id, revision, hf_dir = (origin.get(key) for key in ("repo_id", "revision", "hf_dir"))
    except (OSError, ValueError, AttributeError):
        return None
    if isinstance(repo_id, str):
        return repo_id, revision if isinstance(revision, str) and revision != "main" else None
    return (hf_dir, None) if isinstance(hf_dir, str) and Path(hf_dir, CONFIG).is_file() else None


def hf_origin(base: Path) -> tuple[str, str | None] | None:
    """Return (hub name or Hugging Face folder, revision) of the base model; None if unknown.

    Falls back to the hub name in a path checkpoints/ORGANIZATION/NAME. Ignores ``_name_or_path`` in config.json,
    because transformers records the parent of a finetuned model there.
    """
    parts = base.resolve().parts
    return read_origin(base) or (("/".join(parts[-2:]), None) if "checkpoints" in parts[-3:-2] else None)
