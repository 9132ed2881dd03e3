"""Describe Hugging Face hub errors in one line: what is wrong and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from huggingface_hub import constants, errors
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import HFValidationError, validate_repo_id

from toolkit.errors import UserError, causes_of, one_line
from toolkit.io.atomic import disk_full_reason


def hub_error_types() -> tuple[type[BaseException], ...]:
    """Return the exception types that huggingface_hub and its dependencies raise.

    The bases of HfHubHTTPError are HTTP library errors; the library differs between major versions. hf_xet raises
    RuntimeError. Malformed responses raise ValueError, KeyError or TypeError.
    """
    return (HfHubHTTPError, *HfHubHTTPError.__bases__, OSError, RuntimeError, ValueError, KeyError, TypeError)


@contextmanager
def hub_errors(
    repo_id: str, revision: str = "main", hint: str = "", *, kind: str = "model", is_upload: bool = False
) -> Iterator[None]:
    """Translate exceptions of huggingface_hub into a one-line ``UserError`` that ends with ``hint``."""
    try:
        yield
    except UserError:
        raise
    except hub_error_types() as error:
        reason = describe_hub_error(error, repo_id, revision, kind=kind, is_upload=is_upload)
        raise UserError(reason + hint) from error


def describe_hub_error(
    error: BaseException,
    repo_id: str,
    revision: str,
    *,
    kind: str = "model",
    is_upload: bool = False,
) -> str:
    """Return a one-line message for an error of :func:`hub_error_types`, without credentials.

    Args:
        kind: Repository type, "model" or "dataset", whose options begin with ``--data.``.
        is_upload: Whether ``--push_to_hub`` failed, not a download.
    """
    option, hub = "--data." if kind == "dataset" else "", hub_url()
    where = f"--push_to_hub {repo_id}" if is_upload else f"{option}repo_id {repo_id}"
    page = f"{hub}/{'datasets/' if kind == 'dataset' else ''}{repo_id}"
    verb, noun = ("write to", "upload") if is_upload else ("read", "download")
    causes = list(causes_of(error))
    if full := disk_full_reason(error):
        return f"{where}: {full}; free some space"

    def has(kind: type[BaseException]) -> bool:
        return any(isinstance(cause, kind) for cause in causes)

    status = next((e.response.status_code for e in causes if isinstance(e, errors.HfHubHTTPError)), None)
    login = "log in with `hf auth login` or set HF_TOKEN"
    if has(errors.GatedRepoError):
        return f"{where}: is gated; accept its license at {page}, then {login} to a token of that account"
    if has(errors.RepositoryNotFoundError) and not is_upload:
        return f"{where}: no such {kind} at {hub}, or a private one; check the name, or {login}"
    if has(errors.RevisionNotFoundError):
        return f"{option or '--'}revision {revision}: no such branch, tag or commit of {repo_id}; see {page}/tree/main"
    if status in (401, 403):
        return f"{where}: {hub} refuses the token (status {status}); {login} to one that may {verb} it"
    if has(errors.OfflineModeIsEnabled):
        return f"{where}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, which disables {noun}s; unset it"
    if isinstance(error, (KeyError, TypeError, ValueError)) and status is None:
        return f"{where}: {hub} does not answer like a hub; check HF_ENDPOINT"
    reason = f"status {status}" if status else one_line(causes[-1])[:200]
    tried = f"no {noun} {'to' if is_upload else 'from'} {hub} ({reason})"
    return f"{where}: {tried}; check the network, or HF_ENDPOINT if you use a mirror"


def require_repo_id(repo_id: str, option: str) -> None:
    """Raise UserError unless ``repo_id`` may be a name on the hub."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"{option} {repo_id}: not a valid hub name; give USER/NAME or ORGANIZATION/NAME") from error


def hub_url() -> str:
    """Return the hub's URL for messages, without credentials."""
    url = urlsplit(constants.ENDPOINT)
    return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
