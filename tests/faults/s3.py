"""Faults of an S3 server under a run's uploads: it ends well or in one line, and resumes on a clean machine."""

import os
import random
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from helpers.groups import free_port, read_until
from helpers.processes import Forked, finish
from helpers.s3 import BUCKET, Faults, Server, serve

from tests.faults.core import Way
from tests.faults.states import Result, command, require_intact, require_one_line, require_same_result, undisturbed

KINDS = ("ordinary", "async", "sharded", "machines")
FAULTS = ("errors", "cuts", "slow", "away", "run killed", "refused")
RATES = {"error_500": 0.08, "slow_down_503": 0.04, "cut_request": 0.04, "cut_response": 0.04}
OF_FAULT = {
    "errors": {"error_500": 0.12, "slow_down_503": 0.06},
    "cuts": {"cut_request": 0.08, "cut_response": 0.08},
    "slow": {"bytes_per_second": 5e5},
}


def seeds(kind: str, quick: bool) -> Iterable[int]:
    return range(4 if quick else 60)


def trial(kind: str, seed: int, folder: Path) -> bool:
    """Return whether the server, or the kill, met the run."""
    chance, fault = random.Random(f"{kind}:{seed}"), FAULTS[seed % len(FAULTS)]
    expected = "sharded" if kind == "machines" else kind
    undisturbed(expected)
    name = folder.name  # the servers of a process share what they hold
    with serve() as server:
        assert not server.objects(f"{name}/"), "the run's folder is not empty"
        server.faults = Faults(**OF_FAULT.get(fault, RATES if fault == "run killed" else {}), seed=seed)
        processes = launch(kind, server, name, folder / "machine")
        faults = disturb(fault, processes, server, chance)
        result = end(processes)
        if result.code == -signal.SIGKILL:
            assert fault == "run killed"
        elif result.code == 0:
            assert not result.err, result.err
        else:
            assert result.code in (2, 3), result
            require_one_line(result)
        server.faults = Faults()
        require_intact(download(server, name, folder / "before"))
        resumed = end(launch(kind, server, name, folder / "clean machine"))
        assert resumed.code == 0, f"the resume failed: {resumed.err}"
        require_same_result(expected, download(server, name, folder / "after"))
        return result.code == -signal.SIGKILL if fault == "run killed" else faults.done.total() > 0


def launch(kind: str, server: Server, name: str, staging: Path) -> list[Forked]:
    """Start a run; of the kind "machines" two of one rank each, which share no disk but that of the data."""
    words = command("sharded" if kind == "machines" else kind, Path("OUT"), "--staging_dir", str(staging))
    words[words.index("OUT")] = f"s3://{BUCKET}/{name}"
    if kind != "machines":
        return [Forked(words, **server.environ)]
    words[words.index("--devices") + 1] = "1"
    words += ["--num_nodes", "2", "--fsdp.sharding_strategy", "FULL_SHARD"]
    environ = server.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    at, processes = words.index("--staging_dir") + 1, []
    for node in "01":
        words[at] = f"{staging}-{node}"
        processes.append(Forked([*words], NODE_RANK=node, **environ))
    return processes


def disturb(fault: str, processes: list[Forked], server: Server, chance: random.Random) -> Faults:
    """Return the faults of the server, with their number."""
    process, faults = processes[0], server.faults
    if fault == "run killed":
        read_until(process, chance.choice(("Training", "step 2/6", "step 4/6")))
        time.sleep(chance.uniform(0, 1))
        with suppress(ProcessLookupError):
            os.killpg(chance.choice(processes).pid, signal.SIGKILL)
    elif fault in ("away", "refused"):  # from a random request on; of about 100
        at = chance.randrange(2, 60)
        while sum(server.faults.requests.values()) < at and process.poll() is None:
            time.sleep(0.01)
        server.faults = faults = Faults(is_refused=True) if fault == "refused" else Faults(cut_request=1.0)
        if fault == "away":
            time.sleep(chance.uniform(0.5, 6))
            server.faults = Faults()
    return faults


def end(processes: list[Forked]) -> Result:
    """Wait for all machines. Return the result of the first, or of one that was killed."""
    results = [Result(process.returncode, *texts) for process, texts in [(p, finish(p)) for p in processes]]
    return next((result for result in results if result.code == -signal.SIGKILL), results[0])


def download(server: Server, run: str, folder: Path) -> Path:
    """Copy what the server has to an empty folder, past the faults."""
    folder.mkdir()
    for name in server.objects(f"{run}/"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(server.read(f"{run}/{name}"))
    return folder


WAY = Way(
    "s3",
    "a run whose S3 server fails, resets, slows or disappears uploads whole checkpoints or ends in one line; a clean "
    "machine resumes it bit-equal",
    "S1, S2",
    lambda: KINDS,
    seeds,
    trial,
)
