"""The lossy link of the network's faults loses some packets, and delays the others."""

import subprocess
import sys

import pytest

from tests.faults import network

RECEIVE = """import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("10.99.0.2", 5000)); s.settimeout(60)
print("ready", flush=True)
n = 0
while s.recv(100) != b"end": n += 1
print(n)"""
SEND = """import socket, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for i in range(1000): s.sendto(b"packet", ("10.99.0.2", 5000)); time.sleep(0.0005)
for i in range(20): time.sleep(0.05); s.sendto(b"end", ("10.99.0.2", 5000))"""


@pytest.mark.skipif(not network.can_join(is_lossy=True), reason="no permission to make TUN devices")
def test_lossy_link():
    with network.hosts("loss", is_lossy=True) as names:
        sender, receiver = (["ip", "netns", "exec", name, sys.executable, "-c"] for name in names)
        with subprocess.Popen([*receiver, RECEIVE], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            subprocess.run([*sender, SEND], check=True)
            n = int(process.communicate()[0])
    assert 0.02 < 1 - n / 1000 < 0.08
