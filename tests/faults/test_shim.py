"""Faults happen: the library is in the processes that trials fork from, does each fault, and counts it."""

import errno
import os
import shutil
import signal
import time

import pytest

from tests.faults.shim import Counter, preloaded_processes


def meet(folder, what=None, call=0, last=None):
    """Make five calls in a forked process, as a command is; return its status, calls, faults and what it has seen."""
    counter = Counter(folder)
    environ = counter.environ if what is None else counter.at(call, what, last)
    if (child := os.fork()) == 0:
        os.setsid()
        os.environ |= environ
        seen = ""
        try:
            file = os.open(folder / "out", os.O_CREAT | os.O_WRONLY)
            seen = str(os.write(file, b"1234"))
            os.fsync(file)
            os.rename(folder / "out", folder / "out2")
            os.unlink(folder / "out2")
        except OSError as error:
            seen = errno.errorcode[error.errno]
        (folder / "seen").write_text(seen)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, counter.calls, counter.faults, (folder / "seen").read_text() if status == 0 else ""


def jump(folder, seconds):
    """Return by how much the clock of a forked process jumps, in seconds, and whether that was counted."""
    counter, now = Counter(folder), time.time()
    if (child := os.fork()) == 0:
        os.environ |= counter.environ | {"CLOCK_JUMP": str(seconds), "CLOCK_JUMP_AT": "0"}
        os._exit(0 if abs(time.time() - now - seconds) < 60 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), counter.faults > 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_each_fault_happens_and_is_counted(tmp_path):
    with pytest.raises(RuntimeError, match="no faults can happen: .* without the library"):
        Counter(tmp_path)
    with preloaded_processes(1) as pool:
        run = lambda *words: pool.submit(meet, tmp_path, *words).result()  # noqa: E731
        assert run() == (0, 5, 0, "4")
        for call in range(5):
            assert run("kill", call) == run("kill-one", call) == (-signal.SIGKILL, call + 1, 1, "")
        assert run("kill", 5) == (0, 5, 0, "4")  # it had ended before
        assert run(str(errno.ENOSPC), 1) == (0, 2, 1, "ENOSPC")
        assert run("short", 1) == (0, 5, 1, "2") and run("short", 2) == (0, 5, 0, "4")  # an fsync cannot be short
        assert run("short", 0, 9) == (0, 5, 1, "2")
        assert pool.submit(jump, tmp_path, 7200).result() == (0, True)
