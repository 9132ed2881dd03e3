"""Upload an exported folder to the Hugging Face hub."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from toolkit.checkpoints.hf.hub import TIMEOUT
from toolkit.data.hub_errors import hub_error_types, hub_errors, hub_url, require_repo_id
from toolkit.errors import UserError, require_option
from toolkit.escape import shell_line


def require_target(repo_id: str | None, private: bool) -> None:
    """Raise UserError unless the name is valid, a token is set, and an existing repository has this visibility.

    With ``repo_id`` None, nothing is uploaded, and ``private`` must be true, its default.
    """
    if repo_id is None:
        require_option(private, "private", "false", "has no effect without --push_to_hub; remove it")
        return
    where = f"--push_to_hub {repo_id}"
    require_repo_id(repo_id, "--push_to_hub")
    if "/" not in repo_id:
        raise UserError(f"{where}: not a valid hub name; give USER/NAME or ORGANIZATION/NAME")
    if get_token() is None:
        raise UserError(f"{where}: needs a token that may write; set HF_TOKEN, or log in with `hf auth login`")
    with hub_errors(repo_id, is_upload=True):
        try:
            is_private = HfApi().model_info(repo_id, timeout=TIMEOUT).private
        except RepositoryNotFoundError:
            return
    if bool(is_private) != private:
        state, fix = ("private", "remove --private false") if is_private else ("public", "give --private false")
        raise UserError(f"{where}: exists and is {state}; {fix}, or another name")


def push_folder(folder: Path, repo_id: str, private: bool) -> str:
    """Create the repository if needed, upload the folder in one commit, and return the repository's URL.

    Weights of an earlier upload that the folder lacks are deleted. The folder's card gets the base model's license and
    the repository's name.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    command = shell_line(["hf", "upload", repo_id, str(folder), ".", *["--private"] * private])
    with hub_errors(repo_id, is_upload=True, hint=f"; {folder} is complete; to upload it later, run `{command}`"):
        _complete_card(folder / "README.md", repo_id)
        HfApi().create_repo(repo_id, private=private, exist_ok=True)
        stale = ["model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"]
        HfApi().upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload by toolkit", delete_patterns=stale
        )
    return f"{hub_url()}/{repo_id}"


def _complete_card(path: Path, repo_id: str) -> None:
    """Insert the repository's name, and the license of the base model if its card on the hub has one."""
    card = ModelCard(path.read_text(encoding="utf-8").replace('"path/to/this/folder"', f'"{repo_id}"'))
    with suppress(*hub_error_types()):
        if base := card.data.get("base_model"):
            base_card: Any = HfApi().model_info(base, timeout=TIMEOUT).card_data or {}
            for name in ("license", "license_name", "license_link"):
                if isinstance(value := base_card.get(name), str):
                    card.data[name] = value
    card.save(path)
