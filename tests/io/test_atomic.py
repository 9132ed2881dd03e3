"""Small files survive a power failure: old or new, never empty."""

import os

from toolkit.io.atomic import write_atomic


def test_s1_content_is_synced_before_the_name_and_the_folder_after(tmp_path, monkeypatch):
    path, order, fsync = tmp_path / "COMPLETE", [], os.fsync
    path.write_bytes(b"old")

    def spy(descriptor):
        synced = os.fstat(descriptor)
        order.append((os.path.samestat(synced, os.stat(tmp_path)), synced.st_size, path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    write_atomic(path, b"a new one")
    assert order[0] == (False, 9, b"old")
    assert [(is_folder, content) for is_folder, _, content in order[1:]] == [(True, b"a new one")]
