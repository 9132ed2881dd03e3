"""Two hosts, as network namespaces joined by a cable, which is cut or loses packets: both end in one named line."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from helpers.groups import read_until
from helpers.processes import clean, finish

from tests.faults import lossy_link
from tests.faults.core import Way
from tests.faults.states import Result, command, require_intact, require_same_result, shared

KINDS = ("fsdp", "sharded")
FAULTS = ("cut", "cut for a moment", "loses packets")
PHASES = ("start", "Preparing data", "Building the model", "Training", "step 2/6", "step 4/6")


@cache
def can_join(is_lossy: bool = False) -> bool:
    """Whether this machine lets us make network namespaces and, with ``is_lossy``, TUN devices."""
    try:
        with hosts("probe", is_lossy):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def seeds(kind: str, quick: bool) -> Iterable[int]:
    if not can_join():
        return ()
    return [seed for seed in range(3 if quick else 36) if seed % len(FAULTS) < 2 or can_join(is_lossy=True)]


def trial(kind: str, seed: int, folder: Path) -> bool:
    """Return whether the connection failed while both hosts ran."""
    chance, out, fault = random.Random(f"{kind}:{seed}"), folder / "out", FAULTS[seed % len(FAULTS)]
    with hosts(str(os.getpid())) as names:
        reference = undisturbed_on(kind, names)
    with hosts(str(os.getpid()), is_lossy=fault == "loses packets") as names:
        nodes, has_met = start(kind, out, names, "--timeout", "0.1"), True
        if fault != "loses packets":
            phase = chance.choice(PHASES)
            if phase == "start":
                time.sleep(chance.uniform(0, 8))
            else:
                read_until(nodes[0], phase)
                time.sleep(chance.uniform(0, 0.5))
            ip(names[0], "ip link set cable down")
            has_met = all(node.poll() is None for node in nodes)
            if fault == "cut for a moment":
                time.sleep(chance.uniform(0.1, 3))
                ip(names[0], "ip link set cable up")
        for result in end(nodes):
            lines = result.err.splitlines()
            assert len(lines) <= 1 and result.code in (0, 1, 2), f"{len(lines)} lines: {result.err[-600:]}"
            assert not lines or lines[0].startswith("toolkit"), result.err
            assert bool(lines) == bool(result.code), f"code {result.code}: {result.err}"
        require_intact(out)
        if fault == "loses packets":  # about one in twenty
            n_packets = int(ip(names[0], "cat /sys/class/net/cable/statistics/tx_packets"))
            assert n_packets > 200, f"the hosts have exchanged {n_packets} packets"
        ip(names[0], "ip link set cable up")
        for result in end(start(kind, out, names)):
            assert (result.code, result.err) == (0, ""), f"the resume failed: {result.err}"
    require_same_result(reference, out)
    return has_met


def undisturbed_on(kind: str, names: tuple[str, str]) -> str:
    """Run without faults on two hosts, where sums have another order than on one. Return a name of the kind of run."""
    name = f"{kind} on two hosts"
    folder = shared()["folder"] / "runs" / name.replace(" ", "-")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        results = end(start(kind, new / "out", names))
        assert all(result.code == 0 for result in results), results
        with suppress(OSError):  # another process was first
            new.rename(folder)
    return name


@contextmanager
def hosts(name: str, is_lossy: bool = False) -> Iterator[tuple[str, str]]:
    """Make two network namespaces with 10.99.0.1 and 10.99.0.2, joined by a device "cable"; their names."""
    names, link = (f"tk{name}a", f"tk{name}b"), None
    try:
        for host in names:
            subprocess.run(["ip", "netns", "add", host], check=True, capture_output=True)
        if is_lossy:
            words = [sys.executable, lossy_link.__file__, *names]
            link = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            if not link.stdout.readline():
                raise OSError("no TUN device")
        else:
            words = f"ip link add cable netns {names[0]} type veth peer name cable netns {names[1]}".split()
            subprocess.run(words, check=True, capture_output=True)
        for i, host in enumerate(names, 1):
            for words in (f"ip addr add 10.99.0.{i}/24 dev cable", "ip link set cable up", "ip link set lo up"):
                ip(host, words)
        yield names
    finally:
        if link is not None:
            link.communicate()
        for host in names:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def ip(host: str, words: str) -> bytes:
    return subprocess.run(["ip", "netns", "exec", host, *words.split()], check=True, capture_output=True).stdout


def start(kind: str, out: Path, names: tuple[str, str], *more: str) -> list[subprocess.Popen]:
    """Start a node on each host."""
    words = command(kind, out, "--num_nodes", "2", *more)
    words[words.index("--devices") + 1] = "1"
    where = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29500"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", host, sys.executable, "-m", "toolkit", *words],
            env=clean(where | {"NODE_RANK": str(rank)}),
            **pipes,
        )
        for rank, host in enumerate(names)
    ]


def end(nodes: list[subprocess.Popen]) -> list[Result]:
    try:
        texts = [finish(node, 200) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [Result(node.returncode, *text) for node, text in zip(nodes, texts, strict=True)]


WAY = Way(
    "network",
    "two hosts whose connection is cut or loses packets both end in one line, or finish, and resume bit-equal",
    "S2",
    lambda: KINDS,
    seeds,
    trial,
)
