"""The matrix of `nvidia-smi topo -m`, as recorded on five machines, and the warnings for each."""

from pathlib import Path

import pytest
from toolkit_doctor.topology import find_slow_links, parse_topology

RECORDED = Path(__file__).parent / "topologies"


def recorded(name: str) -> str:
    return (RECORDED / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "gpus", "nics", "warnings"),
    [
        ("nvswitch", 8, 9, []),
        (
            "two_sockets", 8, 0,
            ["SYS: GPU0-GPU4, GPU0-GPU5, GPU0-GPU6, GPU0-GPU7, GPU1-GPU4 and 11 more communicate between CPU sockets "
             "(PCIe and QPI or UPI); CUDA_VISIBLE_DEVICES=0,1,2,3 avoids it"],
        ),
        (
            "five_gpus", 5, 0,
            ["SYS: GPU0-GPU1, GPU0-GPU2, GPU0-GPU3, GPU0-GPU4 communicate between CPU sockets (PCIe and QPI or UPI); "
             "CUDA_VISIBLE_DEVICES=1,2,3,4 avoids it",
             "NODE: GPU1-GPU3, GPU1-GPU4, GPU2-GPU3, GPU2-GPU4 communicate between PCIe host bridges of one socket; "
             "CUDA_VISIBLE_DEVICES=1,2 avoids it"],
        ),
        (
            "nic_on_other_socket", 8, 1,
            ["SYS: all NICs are on a different CPU socket than GPU0, GPU1, GPU2, GPU3, GPU4 and 3 more, which slows "
             "traffic between nodes"],
        ),
        (
            "power9", 4, 6,
            ["SYS: GPU0-GPU2, GPU0-GPU3, GPU1-GPU2, GPU1-GPU3 communicate between CPU sockets (PCIe and QPI or UPI); "
             "CUDA_VISIBLE_DEVICES=0,1 avoids it"],
        ),
    ],
)  # fmt: skip
def test_recorded_topologies(name, gpus, nics, warnings):
    topology = parse_topology(recorded(name))
    assert (len(topology.gpus), len(topology.nics)) == (gpus, nics)
    assert find_slow_links(topology) == warnings


def test_links_are_read_in_both_directions():
    links = parse_topology(recorded("nvswitch")).links
    assert links["GPU0", "GPU7"] == links["GPU7", "GPU0"] == "NV18"
    assert links["GPU4", "NIC0"] == links["NIC0", "GPU4"] == "SYS" and links["GPU7", "NIC7"] == "PXB"


@pytest.mark.parametrize("text", ["", "No devices were found", recorded("nvswitch").split("GPU7\t")[0]])
def test_other_output_is_an_error(text):
    with pytest.raises(ValueError, match="matrix"):
        parse_topology(text)
