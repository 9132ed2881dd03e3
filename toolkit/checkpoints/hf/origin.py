"""Record where a model was imported from: a repository of the Hugging Face hub, or a folder."""

from pathlib import Path

from toolkit.checkpoints.find import read_settings
from toolkit.checkpoints.hf.reader import CONFIG

ORIGIN_FILE = "download.yaml"
"""Records the model's origin: repo_id, revision and commit, or hf_dir."""


def hf_origin(base: Path) -> tuple[str, str | None] | None:
    """Return (hub name or Hugging Face folder, revision) that a model was imported from; None if unknown.

    The revision is None for ``main`` and for folders. Without a record of a folder that still exists, a path
    checkpoints/ORGANIZATION/NAME has the hub name. Ignores ``_name_or_path`` in config.json, because transformers
    records the parent of a finetuned model there.
    """
    match read_settings(base, ORIGIN_FILE):
        case {"repo_id": str(repo_id), "revision": str(revision)} if revision != "main":
            return repo_id, revision
        case {"repo_id": str(repo_id)}:
            return repo_id, None
        case {"hf_dir": str(hf_dir)} if Path(hf_dir, CONFIG).is_file():
            return hf_dir, None
    parts = base.resolve().parts
    return ("/".join(parts[-2:]), None) if "checkpoints" in parts[-3:-2] else None
