"""Check before a run that all ranks have the same options, data, weights and disk, and read disjoint samples."""

import hashlib
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import lightning
import torch

from toolkit.checkpoints.adapters import AdapterInfo
from toolkit.checkpoints.fingerprint import base_fingerprint, peft_fingerprint
from toolkit.checkpoints.manifest import manifest_bytes
from toolkit.data.base import TokenDataset
from toolkit.data.tokens.rows import PythonData
from toolkit.distributed import ranks
from toolkit.errors import UserError
from toolkit.extension import BUILT_IN, extension_versions, registered
from toolkit.io.tempfiles import remove, temporary_prefix
from toolkit.planning.run_args import RunArgs
from toolkit.source_hash import hash_sources
from toolkit.training.checkpoint_meta import RunFingerprint, values_by_flag
from toolkit.training.hyperparameters import callback_paths, hyperparameters
from toolkit.version import __version__

MEMORY_DEPENDENT = ("--train.micro_batch_size", "--strategy", "--fsdp.accumulate")
"""Options that "auto" chooses from the memory of a device."""
MAY_DIFFER = (
    "*_dir", "*path", "*.repo_id", "--from_peft",  # paths: their contents are compared instead
    "--model_name",  # the architecture is compared instead
    "*_workers", "*.max_cache_gb",  # only affects how a node reads data
    "--devices", "--num_nodes", "--accelerator",  # the process group checks the number of ranks
    "--logger_name", "--log.*",  # only rank 0 logs
    "--extensions",  # their code is compared instead
)  # fmt: skip
"""Options that may differ between nodes. All others are compared."""
SAME_ROWS_HINT = "build the same rows on every rank, for example from a generator with a fixed seed"


def require_same_options(args: RunArgs, fingerprint: RunFingerprint) -> None:
    """Check that all ranks run the same code with the same options on the same data."""
    flags = flatten(hyperparameters(args) | {"resume": args.resume, "timeout": args.timeout})
    flags = {flag: value for flag, value in flags.items() if not any(fnmatch(flag, name) for name in MAY_DIFFER)}
    values = code_versions(args) | flags | values_by_flag(asdict(fingerprint))
    for rank, name, value, first in find_differences(values):
        hint = "start every process with the same options, and let all nodes read the same files"
        if name == "--data" and isinstance(args.data, PythonData):
            raise UserError(f"dataset: rank {rank}'s rows differ from rank 0's; {SAME_ROWS_HINT}")
        if name in MEMORY_DEPENDENT:
            hint = f"auto depends on the memory of a node's devices: set {name}"
        elif not name.startswith("-"):
            hint = "use the same versions and source files on all nodes"
        raise UserError(f"{name} {value}: on rank {rank}, but {first} on rank 0; {hint}")


def find_differences(values: Mapping[str, Any]) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield each value that differs from rank 0's: rank, name, value and rank 0's value. Collective."""
    first, *others = ranks.all_gather_object(values)
    for rank, there in enumerate(others, 1):
        for name in {**first, **there}:
            if there.get(name) != first.get(name):
                yield rank, name, there.get(name), first.get(name)


def flatten(options: Mapping[str, Any], prefix: str = "--") -> dict[str, Any]:
    """Flatten nested options to {flag: value}, with flags such as ``--data.sources.web.weight``."""
    flags: dict[str, Any] = {}
    for name, value in options.items():
        flag = prefix[:-1] if name in ("class_path", "init_args") else prefix + name
        flags |= flatten(value, f"{flag}.") if isinstance(value, Mapping) and value else {flag: value}
    return flags


def code_versions(args: RunArgs) -> dict[str, str]:
    """Return code versions by name, with source hashes except for torch and Lightning."""
    versions = {"toolkit": _own_version(), "torch": torch.__version__, "lightning": lightning.__version__}
    versions |= {f"extension {name}": version for name, version in extension_versions().items()}
    paths = set(callback_paths(args)) - registered("callbacks").keys()
    return versions | {f"callback {path}": f"(sources {hash_sources([path.rpartition('.')[0]])})" for path in paths}


@cache
def _own_version() -> str:
    """Return toolkit's version with the hash of its sources when it was first asked for."""
    return f"{__version__} (sources {hash_sources(['toolkit', *BUILT_IN])})"


def require_disjoint_samples(args: RunArgs, rows: TokenDataset) -> None:
    """Check that the ranks read each sample of a user-provided iterable exactly once."""
    if not isinstance(args.data, PythonData):
        return
    from toolkit.data.tokens.iterable import IterableRows  # of use only for data from Python

    if isinstance(rows, IterableRows):
        rows.require_disjoint(ranks.all_gather_object(rows.rank_info()))


def require_same_weights(args: RunArgs, base: AdapterInfo | None, resume_from: Path | None) -> None:
    """Check by checksums on disk that all ranks load the same weights."""
    if ranks.world_size() == 1:
        return
    loaded: dict[str, tuple[str, str]] = {}  # by flag: the folder on this node, and its fingerprint
    if (folder := args.base_dir) is not None and (resume_from is None or base is not None):
        flag = "checkpoint_dir" if args.is_finetune else "--initial_checkpoint_dir"
        loaded[flag] = str(folder.resolve()), base_fingerprint(folder) if base is None else base.base_hash
    if resume_from is None and args.from_peft is not None:
        loaded["--from_peft"] = str(Path(args.from_peft).resolve()), peft_fingerprint(args.from_peft)
    require_same_values(loaded)


def require_same_manifest(folder: Path) -> None:
    """Check that the manifest ``COMPLETE`` of the checkpoint to resume is the same on all nodes, or missing on all."""
    digest = hashlib.sha256(manifest_bytes(folder)).hexdigest()
    require_same_values({"--resume": (str(folder.resolve()), digest)})


def require_same_values(loaded: dict[str, tuple[str, str]]) -> None:
    """Raise UserError if ranks load different content. ``loaded`` maps flags to (folder on this node, fingerprint)."""
    for rank, flag, *_ in find_differences({flag: value for flag, (_, value) in loaded.items()}):
        here = f"{loaded[flag][0]} (on {socket.gethostname()})" if flag in loaded else "nothing"
        folders = ranks.all_gather_object(here)
        raise UserError(
            f"{flag}: {folders[rank]} on rank {rank} and {folders[0]} on rank 0 have different weights or trainer "
            "state; give all nodes the same checkpoint"
        )


def disk_leaders(out_dir: Path, is_node_leader: bool, is_remote: bool) -> list[int]:
    """Return for each rank the first rank whose run folder it sees: 0 for all if the disk is shared. Collective.

    Each rank writes shards into its run folder. Only with remote storage may the folders be on several disks.
    """
    marker = out_dir / f"{temporary_prefix()}{ranks.global_rank()}"
    leader: int | None = None
    with suppress(OSError):  # reported below
        out_dir.mkdir(parents=True, exist_ok=True)
        if is_node_leader:
            marker.touch()
    for rank, name in enumerate(ranks.all_gather_object(marker.name if is_node_leader else None)):
        if leader is None and name is not None and (out_dir / name).exists():
            leader = rank
    leaders: list[Any] = ranks.all_gather_object(leader)
    remove([marker])
    for rank, first in enumerate(leaders):
        if first is None or (first != 0 and not is_remote):
            reason = "cannot access it" if first is None else "has another folder there than rank 0"
            raise UserError(
                f"--out_dir {out_dir}: rank {rank} {reason}; use a folder on a shared disk, remote storage "
                "(such as s3://bucket/run), or --fsdp.state_dict_type full"
            )
    return leaders
