"""Read the GPU links of a node from ``nvidia-smi topo -m`` and find slow ones."""

import re
from itertools import combinations, dropwhile, product, takewhile
from typing import NamedTuple

from toolkit.errors import join_first

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header
_GPU = re.compile(r"GPU\d+")
_SLOW = {
    "SYS": "between CPU sockets (PCIe and QPI or UPI)",
    "NODE": "between PCIe host bridges of one socket",
}
"""Slow connections between GPUs, in nvidia-smi's notation, slowest first."""


class Topology(NamedTuple):
    """The connection of each ordered pair of devices: ``links["GPU0", "NIC1"] == "PIX"``."""

    gpus: list[str]
    nics: list[str]
    links: dict[tuple[str, str], str]


def parse_topology(text: str) -> Topology:
    """Parse the output of ``nvidia-smi topo -m``."""
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header, *rows = list(dropwhile(lambda words: not words or not _GPU.fullmatch(words[0]), lines)) or [[]]
    names = list(takewhile(lambda name: name != "CPU", header))  # CPU Affinity and NUMA Affinity follow
    links = {
        (words[0], other): link
        for words in rows
        if words and words[0] in names and len(words) > len(names)
        for other, link in zip(names, words[1:], strict=False)
    }
    gpus = [name for name in names if _GPU.fullmatch(name)]
    if not gpus or not links.keys() >= set(product(gpus, gpus)):
        raise ValueError("no complete GPU matrix")
    return Topology(gpus, [name for name in names if name not in gpus], links)


def find_slow_links(topology: Topology) -> list[str]:
    """Return one warning line each for GPU pairs that cross sockets or host bridges, and for GPUs whose NICs are all on
    another socket."""
    warnings = []
    gpus, links = topology.gpus, topology.links
    for i, (kind, meaning) in enumerate(_SLOW.items(), 1):
        pairs = [f"{a}-{b}" for a, b in combinations(gpus, 2) if links[a, b] == kind]
        if pairs:
            warnings.append(f"{kind}: {join_first(pairs)} communicate {meaning}; {_avoid(topology, [*_SLOW][:i])}")
    nics = topology.nics
    far = [gpu for gpu in gpus if nics and all(links.get((gpu, nic)) == "SYS" for nic in nics)]
    if far:
        warnings.append(
            f"SYS: all NICs are on a different CPU socket than {join_first(far)}, which slows traffic between nodes"
        )
    return warnings


def _avoid(topology: Topology, kinds: list[str]) -> str:
    """Suggest a set of GPUs without links of these ``kinds``."""
    groups: list[list[str]] = []
    for gpu in topology.gpus:
        home = next((g for g in groups if not any(topology.links[gpu, other] in kinds for other in g)), None)
        if home is None:
            groups.append([gpu])
        else:
            home.append(gpu)
    largest = max(groups, key=len)
    if len(largest) == 1:
        return "no pair of GPUs has a faster connection"
    return f"CUDA_VISIBLE_DEVICES={','.join(gpu.removeprefix('GPU') for gpu in largest)} avoids it"
