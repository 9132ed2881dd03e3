"""Where this host's name is a loopback address, gloo listens on the interface that reaches the other nodes."""

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.processes import clean, common_flags, finish
from helpers.small_runs import text_data

from tests.faults import network
from toolkit.distributed import interfaces

NAME = "GLOO_SOCKET_IFNAME"


def chosen(monkeypatch, master: str, address_of_name: str, name: str = "") -> str:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv(NAME, name)
    monkeypatch.setattr(interfaces, "_addresses", lambda host: [address_of_name])
    interfaces.choose_gloo_interface()
    return os.environ[NAME]


def test_interface_that_reaches_node_0_is_chosen_for_a_loopback_name(monkeypatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((interfaces._ANY_HOST, 9))
        except OSError:
            pytest.skip("no network interface")
        address = probe.getsockname()[0]
    if shutil.which("ip") is None:
        pytest.skip("no program that lists interfaces")
    interface = chosen(monkeypatch, address, "127.0.1.1")
    listed = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True).stdout
    assert re.search(rf"^\d+: {re.escape(interface)} +inet {re.escape(address)}/", listed, re.MULTILINE), listed
    for master, address_of_name, name in (
        ("127.0.0.1", "127.0.0.1", ""),
        ("localhost", "127.0.0.1", ""),
        (address, address, ""),
        (address, "127.0.1.1", "lo"),
    ):
        assert chosen(monkeypatch, master, address_of_name, name) == name


@pytest.mark.slow
def test_two_hosts_whose_names_are_loopback_addresses(corpus, tmp_path):
    """Two network namespaces, as Kubeflow describes its pods. Red without the interface: connection refused."""
    if not network.can_join():
        pytest.skip("no network namespaces")
    flags = [*text_data(corpus), *common_flags(tmp_path / "out", max_steps=4)]
    words = [
        sys.executable,
        "-m",
        "toolkit",
        "pretrain",
        "pico-llama",
        "--accelerator",
        "cpu",
        "--devices",
        "1",
        *flags,
    ]
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "10.99.0.1", "PET_MASTER_PORT": "29500"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with network.hosts(str(os.getpid())) as names:
        nodes = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *words], env=clean(pod | {"PET_NODE_RANK": str(rank)}), **pipes
            )
            for rank, host in enumerate(names)
        ]
        texts = [finish(node, 300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert "x 2 devices x" in texts[0][0], texts[0][0]
