"""Describe the environment of a run: versions, machine, devices, variables, disks. Contains no secrets.

Imports torch inside functions, so the report works even if torch fails to import.
"""

import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from toolkit.data.cache import choose_cache_dir
from toolkit.distributed.cpu_memory import memory_limit
from toolkit.errors import one_line
from toolkit.io.processes import count_cores
from toolkit.ui.events import package_versions

Sections = dict[str, dict[str, str]]  # title -> name -> text

_PER_PROCESS = (
    "((LOCAL|GROUP|ROLE|NODE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|MASTER_(ADDR|PORT)|TOOLKIT_PARENT_PID"
    "|SLURM_(PROCID|LOCALID|NODEID|TASK_PID|GTIDS|(TOPOLOGY|LAUNCH|STEP)_.*)|SLURMD_NODENAME"
)
"""Variables that differ by rank or node in every healthy run, or that the launcher sets."""
_SHOWN = re.compile(
    "(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|CUDA|CUBLAS|OMP|MKL|GOMP|SLURM|TOOLKIT|UCX|FI)_.*|" + _PER_PROCESS
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|JWT|COOKIE")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the CPU waits for every CUDA kernel",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand or RoCE",
    "NCCL_P2P_DISABLE": "GPUs of a node do not exchange data directly",
    "NCCL_TIMEOUT": "no effect; set the timeout of collectives with --timeout",
    "NCCL_SHM_DISABLE": "processes of a node communicate through the network",
}
"""Variables that slow a run down or do nothing if they are set and not 0, each with the effect."""
_SHARED_MEMORY = Path("/dev/shm")  # NCCL and data loader workers use it
_MIN_SHM = 1e9  # bytes; Docker's default is 64 MB


def describe_environment(out_dir: str) -> Sections:
    """Return this process's environment for a bug report, including the free disk space of ``out_dir``."""
    return {
        "Versions": package_versions() | {"python": f"{platform.python_version()} ({sys.executable})"},
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
        shown = entries or {"none": ""}
        lines += [title, *(f"  {name:{width}}  {text}".rstrip() for name, text in shown.items())]
    return "\n".join(lines)


def variables(environ: Mapping[str, str] = os.environ, nccl_files: Sequence[Path] | None = None) -> dict[str, str]:
    """Return the variables that affect a run, by name, from the environment and NCCL's config files.

    Only names that match ``_SHOWN`` are returned, never tokens or keys; passwords in URLs are masked.

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
    shown = {name: re.sub(r"(?<=://)[^/@\s]+@", "***@", value) for name, value in sorted(values.items())}
    return {n: value for n, value in shown.items() if _SHOWN.fullmatch(n) and not _SECRET.search(n.upper())}


def find_differences(by_rank: list[Sections]) -> list[str]:
    """Return one line per version or variable that differs from rank 0's."""
    lines = []
    for title in ("Versions", "Variables"):
        entries = [sections[title] for sections in by_rank]
        names = sorted({name for there in entries for name in there if not re.fullmatch(_PER_PROCESS, name)})
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
        if (total := shutil.disk_usage(_SHARED_MEMORY).total) < _MIN_SHM:
            problems.append(
                f"/dev/shm has only {_gb(total)}: data loading and NCCL may fail; with Docker, use --shm-size 8g"
            )
    if "nvidia-smi" in sections["Devices"]:
        problems.append(f"torch finds no GPU, but nvidia-smi lists GPUs: {sections['Devices']['torch']}")
    return problems


def nvidia_smi(*arguments: str) -> str | None:
    """Return the output of nvidia-smi; None if it is missing or fails."""
    try:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _machine() -> dict[str, str]:
    facts = {"host": socket.gethostname(), "system": f"{platform.platform()}, {platform.machine()}"}
    facts["cpu"] = f"{os.cpu_count()} cores, {count_cores()} of them usable"
    with suppress(OSError, LookupError):
        model = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0]
        facts["cpu"] = f"{model}, {facts['cpu']}"
    with suppress(OSError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free, swap = (_gb(int(lines[n].split()[0]) * 1024) for n in ("MemTotal", "MemAvailable", "SwapTotal"))
        facts["memory"] = f"{total}, {free} available, swap {swap}"
    limit = memory_limit()
    facts["cgroup limit"] = "none" if limit == math.inf else _gb(limit)
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    locked_text = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked // 1024:,} KiB"
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
    facts = {"torch": f"{build} build, threads: {torch.get_num_threads()}"}
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
        gpu = torch.cuda.get_device_properties(index)
        facts[f"cuda:{index}"] = f"{gpu.name}, {_gb(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
    return facts


def _disks(out_dir: str) -> dict[str, str]:
    folders = {"out_dir": Path(out_dir), "data cache": choose_cache_dir(), "temporary": Path(tempfile.gettempdir())}
    if _SHARED_MEMORY.exists():
        folders["shared memory"] = _SHARED_MEMORY
    disks = {}
    for name, folder in folders.items():
        try:
            existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
            usage = shutil.disk_usage(existing)
            disks[name] = f"{folder}: {_gb(usage.free)} free of {_gb(usage.total)}"
        except OSError as error:
            disks[name] = f"{folder}: {error.strerror}"
    return disks


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
