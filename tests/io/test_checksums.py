import os

import pytest
from helpers.damage import flip

from toolkit.io import checksums
from toolkit.io.checksums import check_entries, checksum_files, find_damage


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 1000)
    monkeypatch.setattr(checksums, "_READ_SIZE", 300)  # neither divides the other
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "sub" / "b").write_bytes(b"x" * 2000)
    (tmp_path / "empty").touch()
    return tmp_path


NAMES = ["a", "sub/b", "empty"]


def test_unchanged_files_verify(folder):
    files = checksum_files(folder, NAMES)
    assert [files[name]["size"] for name in NAMES] == [2560, 2000, 0]
    assert [len(files[name]["crc32"]) for name in NAMES] == [3, 2, 0]
    assert find_damage(folder, check_entries(files)) == {}


def test_damaged_files_are_named(folder):
    files = checksum_files(folder, NAMES)
    for offset in (0, 999, 1000, 2559):  # the edges of a chunk, and the last one, which is shorter
        flip(folder / "a", offset)
        assert find_damage(folder, files).keys() == {"a"}, offset
        flip(folder / "a", offset)
    os.truncate(folder / "a", 2559)
    (folder / "sub" / "b").unlink()
    (folder / "empty").unlink()
    os.mkfifo(folder / "empty")  # read, it would wait for ever
    damage = find_damage(folder, files)
    assert damage == {"a": "2,559 bytes instead of 2,560", "sub/b": "missing", "empty": "not a regular file"}


def test_entries_from_a_file_are_validated(folder):
    good = checksum_files(folder, ["a"])["a"]
    wrong = [
        None, [], {"a": None}, {"a": {}}, {"a": good | {"size": -1}}, {"a": good | {"size": 2560.0}},
        {"a": good | {"crc32": ["0"]}}, {"/etc/passwd": good}, {"../a": good}, {"": good}, {"a\0": good},
    ]  # fmt: skip
    for files in wrong:
        with pytest.raises(ValueError):
            check_entries(files)
