"""The oracle of fuzzing sees each way in which a reader can fail."""

import mmap
import os
from random import Random

import pytest

from tests.faults import fuzz
from tests.faults.hostile import WITNESS
from tests.faults.mutate import KINDS, mutate
from tests.faults.parsers import PARSERS, Parser
from toolkit.errors import UserError


def crash(content):
    raise IndexError("a reader's own mistake")


def long_line(content):
    raise UserError("x" * 60)


FAULTS = {
    "crash": (crash, "IndexError in .*a reader's own mistake"),
    "length": (long_line, "prints 1 lines, 76 characters: 'toolkit verify: xxx"),
    "code": (lambda content: open(WITNESS, "w").close(), "code of the file ran"),
    "program": (lambda content: os.system("true"), "code of the file ran: .*os.system"),
    "time": (lambda content: sum(1 for _ in range(10**10)), "takes more than [1-9] s"),
    # new pages: bytes may lie in memory that a run in this process has freed and keeps
    "memory": (lambda content: mmap.mmap(-1, 200 << 20).write(b"a" * (200 << 20)), "takes [1-4][0-9][0-9] MiB"),
    "end": (lambda content: os._exit(0), "input 0 .* ended the process"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_reader_is_reported(fault, tmp_path, monkeypatch):
    def make(folder):
        (folder / "a.json").write_text('{"a": 1}')
        return ["a.json"]

    def read(folder):
        if (folder / "a.json").read_bytes() != b'{"a": 1}':
            FAULTS[fault][0](b"")

    monkeypatch.setitem(PARSERS, "faulty", Parser(make, read, max_seconds=1, prepare=lambda: None))
    monkeypatch.setattr(fuzz, "BATCH", 1)
    monkeypatch.setattr(fuzz, "MAX_LINE", 70)
    monkeypatch.setattr(fuzz, "MAX_MEMORY", 100 << 20)
    with pytest.raises(AssertionError, match=FAULTS[fault][1]):
        fuzz.trial("faulty", 0, tmp_path)


def test_equal_seeds_damage_equally():
    for end, content in {
        ".json": b'{"a": [1, {"b": 2}]}',
        ".csv": b"a,b\n1,2\n",
        ".yaml": b"a: 1\n",
        ".bin": b"abc",
    }.items():
        first, second = ([mutate(f"f{end}", content, Random(seed)) for seed in range(50)] for _ in "ab")
        assert first == second and len(set(first)) > 20 and (end in KINDS or end == ".bin")
