"""Foreign bytes: whatever a file or a request holds, it is read, or refused with one line; nothing of it runs."""

import contextlib
import io
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.faults.core import Way
from tests.faults.hostile import WITNESS
from tests.faults.mutate import mutate
from tests.faults.parsers import PARSERS, Parser
from toolkit.cli import dispatch
from toolkit.errors import CommandError

BATCH = 200
MAX_SECONDS, MAX_MEMORY = 5, 1 << 30  # of an input, and of a batch
MAX_LINE = 2000 + len("toolkit verify: ")  # characters
MAX_ADDRESSES = 16 << 30  # bytes; so that an input cannot take the machine's memory
_RUNS_CODE = ("os.system", "os.exec", "os.posix_spawn", "pty.spawn", "ctypes.dlopen")


class _TooSlow(BaseException):
    pass


def seeds(subject: str, quick: bool) -> Iterable[int]:
    return range(1 if quick else 30)


def trial(subject: str, seed: int, folder: Path) -> int:
    """Read a batch of inputs in a child process, which an input may kill. Return their number."""
    PARSERS[subject].prepare()
    read_end, write_end = os.pipe()
    if (child := os.fork()) == 0:
        result: dict[str, Any] = {"failure": "the child ended"}
        try:
            os.close(read_end)
            result = _batch(PARSERS[subject], random.Random(f"{subject} {seed}"), folder)
        except BaseException as error:
            result = {"error": "".join(traceback.format_exception(error))[-1500:]}
        finally:
            os.write(write_end, json.dumps(result).encode())
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    number = (folder / "number").read_text() if (folder / "number").exists() else "none"
    assert status == 0 and text, f"input {number} ended the process with status {status}"
    result = json.loads(text)
    if "error" in result:
        raise RuntimeError(result["error"])
    assert result["failure"] is None, result["failure"]
    return result["count"]


def _batch(parser: Parser, chance: random.Random, folder: Path) -> dict[str, Any]:
    """Return {"count": inputs} with the first failure, if any."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESSES, MAX_ADDRESSES))
    (folder / "work").mkdir()
    (folder / "files").mkdir()
    os.chdir(folder / "work")
    names = parser.make(folder / "files")
    valid = {name: (folder / "files" / name).read_bytes() for name in names}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _no_warnings():
        parser.read(folder / "files")  # valid files are not refused
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ran = _watch()
    failures: list[str] = []
    n_damaged = 0
    for number in range(BATCH):
        name = chance.choice(names)
        (folder / "number").write_text(f"{number} ({name})")
        path = folder / "files" / name
        content = mutate(name, valid[name], chance)
        n_damaged += content != valid[name]
        path.write_bytes(content)
        failure = _try(parser, folder)
        if (folder / "work" / WITNESS).exists() or ran:
            failure = f"code of the file ran: {ran}"
        growth = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory)
        if growth > MAX_MEMORY:
            failure = f"takes {growth >> 20} MiB"
            memory += growth >> 10
        if failure:
            failures.append(f"input {number} ({name}): {failure}")
            if os.environ.get("FUZZ_KEEP"):
                keep = Path(os.environ["FUZZ_KEEP"]) / f"{len(os.listdir(os.environ['FUZZ_KEEP']))}-{Path(name).name}"
                keep.write_bytes(path.read_bytes())
                print(failures[-1], file=sys.__stderr__)
            ran.clear()
        path.write_bytes(valid[name])
    return {"count": n_damaged, "failure": f"{len(failures)} of {BATCH}: {failures[0]}" if failures else None}


def _try(parser: Parser, folder: Path) -> str | None:
    """Read the files; return what is wrong with how it ends."""

    def stop(number: int, frame: Any) -> None:
        raise _TooSlow

    _set_timers(stop, parser.max_seconds or MAX_SECONDS)
    started_at = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), _no_warnings():
            parser.read(folder / "files")
        return None
    except (CommandError, *parser.refusals) as error:
        return _printed(error) if isinstance(error, CommandError) else None
    except _TooSlow:
        return f"takes more than {time.monotonic() - started_at:.0f} s"
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        mine = [f for f in traceback.extract_tb(error.__traceback__) if "/toolkit/" in f.filename] or [place]
        where = f"{Path(mine[-1].filename).name}:{mine[-1].lineno}"
        return f"{type(error).__name__} in {where}: {' '.join(str(error).split())[:150]}"
    finally:
        _set_timers(stop, 0)


def _printed(error: CommandError) -> str | None:
    """Return what is wrong with what the command line prints of an error."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        dispatch._end("toolkit verify", error, error.exit_code)
    lines = err.getvalue().split("\n")
    if len(lines) != 2 or not lines[0].isprintable() or len(lines[0]) > MAX_LINE:
        return f"prints {len(lines) - 1} lines, {len(lines[0])} characters: {lines[0][:100]!r}"
    return None


def _set_timers(stop: Any, seconds: float) -> None:
    """Stop after these seconds of this process, or ten times that; a loop in C that goes on is killed."""
    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 4 * seconds)


@contextlib.contextmanager
def _no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _watch() -> list[str]:
    """Return a list that gets each start of a program, other than of toolkit's own sandbox."""
    ran: list[str] = []

    def hook(event: str, words: tuple[Any, ...]) -> None:
        is_sandbox = event == "subprocess.Popen" and words[0] == sys.executable
        if event in _RUNS_CODE or (event == "subprocess.Popen" and not is_sandbox):
            ran.append(f"{event} {words!r:.100}")

    sys.addaudithook(hook)
    return ran


WAY = Way(
    "fuzz",
    "foreign bytes are read, or refused with one line; nothing of them runs, in bounded time and memory",
    "S4",
    lambda: PARSERS,
    seeds,
    trial,
)
