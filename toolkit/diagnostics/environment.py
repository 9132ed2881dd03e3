"""Describe the environment of a run: versions, machine, devices, variables, disks. Contains no secrets.

Imports torch inside functions, so the report works even if torch fails to import.
"""

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from toolkit.data.cache import default_cache_dir
from toolkit.errors import one_line
from toolkit.version import __version__

Sections = dict[str, dict[str, str]]  # title -> name -> text

PACKAGES = (
    "torch", "lightning", "litdata", "jsonargparse", "transformers", "peft", "bitsandbytes", "torchao", "tokenizers",
    "safetensors", "huggingface_hub", "numpy",
)  # fmt: skip
_PREFIXES = (
    "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "CUDA_", "CUBLAS_", "OMP_", "MKL_", "GOMP_", "SLURM_",
    "TOOLKIT_", "UCX_", "FI_",
)  # fmt: skip
_NAMES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_PER_PROCESS = re.compile(
    f"{'|'.join(_NAMES)}|TOOLKIT_PARENT_PID|SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID|SLURM_(TASK_PID|GTIDS)"
    "|SLURM_(TOPOLOGY|LAUNCH|STEP)_.*|SLURMD_NODENAME"
)
"""Variables that differ by rank or node in every healthy run, or that the launcher sets."""
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|JWT|COOKIE")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every CUDA kernel",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "GPUs of a node do not exchange data directly",
    "NCCL_TIMEOUT": "no effect; set the timeout of collectives with --timeout",
    "NCCL_SHM_DISABLE": "processes of a node communicate through the network",
}
"""Variables that slow a run down or do nothing if they are set and not 0, each with the effect."""
_MIN_SHM = 1e9  # bytes; NCCL and data loader workers use /dev/shm; Docker's default is 64 MB
_NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes "no limit" as a number near 2**63


def describe_environment(out_dir: str) -> Sections:
    """Return this process's environment for a bug report, including the free disk space of ``out_dir``."""
    return {
        "Versions": _versions(),
        "Machine": _machine(),
        "Devices": _devices(),
        "Variables": variables(),
        "Disks": _disks(out_dir),
    }


def format_sections(sections: Sections) -> str:
    """Format the sections as text: a title, then an indented line per entry."""
    width = max(len(name) for entries in sections.values() for name in entries)
    lines: list[str] = []
    for title, entries in sections.items():
        lines += [title, *(f"  {name:{width}}  {text}".rstrip() for name, text in entries.items())]
        if not entries:
            lines.append("  none")
    return "\n".join(lines)


def variables(environ: Mapping[str, str] = os.environ, nccl_files: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the variables that affect a run, by name, from the environment and NCCL's config files.

    Only names with known prefixes are returned, never tokens or keys; passwords in URLs are masked.

    Args:
        environ: Environment variables; they override the files.
        nccl_files: NCCL config files; later ones override earlier ones. Default: NCCL's standard paths.
    """
    own_file = Path(environ.get("NCCL_CONF_FILE", "~/.nccl.conf")).expanduser()
    values: dict[str, str] = {}
    for file in nccl_files or [Path("/etc/nccl.conf"), own_file]:
        with suppress(OSError, UnicodeDecodeError):
            pairs = re.findall(r"^\s*(NCCL_\w+)\s*=\s*(.*?)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
            values |= {name: f"{value} ({file})" for name, value in pairs}
    values |= environ
    shown = {name: value for name, value in sorted(values.items()) if name.startswith(_PREFIXES) or name in _NAMES}
    return {name: _without_password(value) for name, value in shown.items() if not _SECRET.search(name.upper())}


def find_differences(by_rank: list[Sections]) -> list[str]:
    """Return one line per version or variable that differs from rank 0's."""
    lines = []
    for title in ("Versions", "Variables"):
        entries = [sections[title] for sections in by_rank]
        names = sorted({name for there in entries for name in there if not _PER_PROCESS.fullmatch(name)})
        for name in names:
            texts = [there.get(name, "not set" if title == "Variables" else "not installed") for there in entries]
            if (rank := next((i for i, text in enumerate(texts) if text != texts[0]), None)) is not None:
                lines.append(f"{name}: {texts[0]} on rank 0, {texts[rank]} on rank {rank}")
    return lines


def find_problems(sections: Sections) -> list[str]:
    """Return one line per problem that makes runs slow or fail."""
    problems = [
        f"{name}={value}: {effect}"
        for name, effect in _SLOW.items()
        if (value := sections["Variables"].get(name, "0")).partition(" ")[0] != "0"
    ]
    with suppress(OSError):
        if (total := shutil.disk_usage("/dev/shm").total) < _MIN_SHM:
            problems.append(
                f"/dev/shm has only {_gb(total)}: data loading and NCCL may fail; with Docker, use --shm-size 8g"
            )
    if "nvidia-smi" in sections["Devices"]:
        problems.append(f"torch finds no GPU, but nvidia-smi lists GPUs: {sections['Devices']['torch']}")
    return problems


def memory_limit(root: Path = Path("/")) -> int | None:
    """Return the cgroup (v1 or v2) memory limit of this process in bytes, including parent groups."""
    try:
        groups = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base = root / "sys" / "fs" / "cgroup" / controllers
        file = "memory.max" if controllers == "" else "memory.limit_in_bytes"
        folder = base / path.lstrip("/")
        for above in (folder, *folder.parents[: len(folder.parts) - len(base.parts)]):
            with suppress(OSError, ValueError):  # "max"
                limits.append(int((above / file).read_text()))
    return min((limit for limit in limits if limit < _NO_LIMIT), default=None)


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi; None if it is missing or fails."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    versions = {"python": f"{platform.python_version()} ({sys.executable})", "toolkit": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _machine() -> dict[str, str]:
    facts = {"host": socket.gethostname(), "system": f"{platform.platform()}, {platform.machine()}"}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["cpu"] = f"{_cpu_name()}{os.cpu_count()} cores, {usable} of them usable"
    with suppress(OSError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free, swap = (int(lines[n].split()[0]) * 1024 for n in ("MemTotal", "MemAvailable", "SwapTotal"))
        facts["memory"] = f"{_gb(total)}, {_gb(free)} available, swap {_gb(swap)}"
    limit = memory_limit()
    facts["cgroup limit"] = "none" if limit is None else _gb(limit)
    with suppress(ImportError):  # not on Windows
        import resource

        files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
        is_unlimited = locked < 0 or locked >= _NO_LIMIT
        locked_text = "unlimited" if is_unlimited else f"{locked // 1024:,} KiB"
        facts["limits"] = f"{files:,} open files, locked memory {locked_text}"
    with suppress(OSError):
        facts["network"] = ", ".join(name for _, name in socket.if_nameindex())
    return facts


def _devices() -> dict[str, str]:
    try:
        import torch
    except Exception as error:  # a broken installation raises many kinds
        return {"torch": f"does not import: {type(error).__name__}: {one_line(error)}"}
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "CPU"
    facts = {"torch": f"{build} build, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"}
    if torch.backends.mps.is_available():
        facts["mps"] = "available"
    driver = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    if driver is not None:
        facts["driver"] = driver.split("\n")[0]
    if not torch.cuda.is_available():
        if driver is not None:
            facts["nvidia-smi"] = f"{len(driver.split())} GPUs"
        facts["cuda"] = "no device"
        return facts
    with suppress(Exception):  # builds for other vendors may lack either
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["cudnn"] = str(torch.backends.cudnn.version())
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        facts[f"cuda:{index}"] = f"{properties.name}, {_gb(properties.total_memory)}, {capability}"
    return facts


def _disks(out_dir: str) -> dict[str, str]:
    folders = {"out_dir": Path(out_dir), "data cache": default_cache_dir(), "temporary": Path(tempfile.gettempdir())}
    disks = {}
    for name, folder in (folders | {"shared memory": Path("/dev/shm")}).items():
        try:
            existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            usage = shutil.disk_usage(existing)
        except OSError as error:
            disks[name] = f"{folder}: {error.strerror}"
            continue
        if name == "shared memory" and existing != folder:
            continue
        disks[name] = f"{folder}: {_gb(usage.free)} free of {_gb(usage.total)}"
    return disks


def _cpu_name() -> str:
    with suppress(OSError):
        if names := re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return f"{names[0]}, "
    return ""


def _without_password(value: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", value)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
