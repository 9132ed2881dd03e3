"""How the processes of a run end: all of them, with one message, and the exit code of what went wrong.

Whoever fails leaves word of it at the store, then the process group, which the others notice if they wait for it in a
collective. Rank 0 finds out what has happened and says it; the others end in silence, unless rank 0 itself is gone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.distributed.lifeline import Lifeline
from toolkit.distributed.rendezvous import FAILED, within
from toolkit.distributed.world import WorldInfo
from toolkit.errors import CommandError, PeerLostError, PeerShutdownError, settle

PARENT = "TOOLKIT_PARENT_PID"  # tells a process that another one of its node has started it
_LINGER = 5.0  # seconds that a failed run gives its processes to end by themselves
_GRACE = 30.0  # seconds after which a process that hangs in a failed run is ended from outside
_GO_ON = "and the run with it"

children: list[subprocess.Popen] = []
"""Local ranks 1, 2, ... of this node, in the process that has started them."""


class ShutdownCoordinator:
    """One process's part in the end of a run.

    Args:
        layout: The processes of the run.
        store: Where they leave word; None before they have met.
    """

    lifeline: Lifeline | None = None
    """Their connections to rank 0, from when they have met until the process group exists."""

    def __init__(self, layout: WorldInfo) -> None:
        self.layout = layout
        self.store: dist.Store | None = None
        self._started, self._over, self._over_elsewhere = threading.Event(), threading.Event(), threading.Event()
        self._others = range(1, layout.world_size)
        self.resume_hint = lambda: "--resume auto continues from the newest checkpoint, if one was saved"

    @property
    def is_reporter(self) -> bool:
        """Whether this process is_reporter for its node where rank 0 cannot."""
        return self.layout.local_rank == 0 or self.layout.global_rank == 1

    def peer_failed(self) -> bool:
        """Whether some process has ended already."""
        return bool(self._dead()) or self.store.check(["ended"])

    def end(self, error: BaseException) -> NoReturn:
        """Leave word of why this process ends, learn why the others do, and raise what is to be said here."""
        if isinstance(error, PeerLostError) and error.__cause__ is not None:
            error = error.__cause__  # why this rank has failed the others
        self._started.set()
        met = self.store is not None
        try:
            verdict = self._end_first(error) if self.layout.global_rank == 0 else self._end_other(error)
        finally:
            wait_for_children(_LINGER if met else 0)
            _kill_children()
            self._over.set()
        settle(verdict)
        raise self._with_hint(verdict) from verdict.__cause__

    def _with_hint(self, verdict: BaseException) -> BaseException:
        """Add to what is printed here of a lost process what the run can be resumed from."""
        if _GO_ON in str(verdict):
            verdict.args = (f"{verdict}; {self.resume_hint()}",)
        return verdict

    def _end_first(self, error: BaseException) -> BaseException:
        self._publish("ended")
        disconnect()
        if _is_loss(error):
            error = self._root_cause(error)
        self._publish("end", error)
        deadline = time.monotonic() + _LINGER
        with suppress(Exception):  # the store lives in this process: keep it until the other nodes have read it
            while len(children) < len(self._others) and self.store.add("read", 0) < len(self._others):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return error

    def _end_other(self, error: BaseException) -> BaseException:
        rank, own, dead = self.layout.global_rank, not _is_loss(error), self._dead()
        if own:
            self._publish(f"left/{rank}", error, f"rank {rank}: ")
        else:
            self._publish(f"left/{rank}", PeerLostError(dead) if dead else None)
        self._publish("ended")
        disconnect()
        quiet = not own or isinstance(error, CommandError | KeyboardInterrupt)
        word = self._read_rank0(2 * _LINGER if quiet else 1.0)
        if word is not None and (quiet or word[1] == _text(error)):  # what fails on all ranks is said once
            return PeerShutdownError(word[0])
        if self.store is None and self.layout.local_rank != 0:  # nobody has met; one line from each node
            return PeerShutdownError(getattr(error, "exit_code", 1))
        return error if own else self._without_first()

    def _without_first(self) -> CommandError:
        return (
            PeerLostError(f"rank 0 is gone or does not answer, {_GO_ON}") if self.is_reporter else PeerShutdownError(1)
        )

    def _root_cause(self, error: BaseException | None) -> PeerLostError:
        """Why another rank has ended: what it says itself, which may take a moment, or what is seen from here."""
        deadline, left = time.monotonic() + _LINGER / 2, []
        while time.monotonic() < deadline:
            dead = self._dead()
            with suppress(Exception):
                left = [rank for rank in self._others if self.store.check([f"left/{rank}"])]
                failed = [FAILED] if self.store.check([FAILED]) else []
                for code, text in [self._read(key) for key in failed + [f"left/{rank}" for rank in left]]:
                    if text:
                        cause = PeerLostError(text)
                        cause.exit_code = code
                        return cause
            if dead or len(left) == len(self._others):
                break
            time.sleep(0.05)
        if dead := self._dead():
            return PeerLostError(dead)
        if isinstance(error, PeerLostError):
            return error
        names = name_ranks([rank for rank in self._others if rank not in left] or self._others)
        if "imed out" in str(error):
            return PeerLostError(f"no answer from {names} for {ranks.timeout() / 60:g} minutes (--timeout), {_GO_ON}")
        return PeerLostError(f"{names} is gone, {_GO_ON}")

    def _dead(self) -> str:
        """Which of the processes that this one has started is gone, and how; empty while all are there."""
        codes = {self.layout.global_rank + i: child.poll() for i, child in enumerate(children, 1)}
        gone = sorted((code, rank) for rank, code in codes.items() if code is not None)
        if not gone:
            lost = set() if self.lifeline is None else self.lifeline.lost - codes.keys()
            return f"rank {min(lost)} has ended or its node is unreachable, {_GO_ON}" if lost else ""
        code, rank = gone[0]  # who was killed before who ended, perhaps for that reason
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"rank {rank} {how}, {_GO_ON}"

    # ---- from outside

    def watch(self) -> None:
        """Start to watch over this process, for as long as the run lasts.

        Some time after another process has gone this one is ended, if it has not done so itself: it may hang in a
        collective, or in asking rank 0.
        """
        for task in (self._watch, self._listen):
            threading.Thread(target=task, daemon=True).start()

    def _listen(self) -> None:
        """Learn that another node has ended. A thread of its own: a store that does not answer keeps whoever asks."""
        while not self._over.wait(0.5) and not self._over_elsewhere.is_set():
            with suppress(Exception):  # a store that is gone is noticed by who needs it
                if self.store is not None and self.store.check(["ended"]):
                    self._over_elsewhere.set()

    def done(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        parent = os.getppid() if os.environ.get(PARENT) == str(os.getppid()) else None
        while not (self._started.is_set() or self._is_over(parent)):
            if self._over.wait(0.5):
                return
        if self._over.wait(_GRACE):
            return
        first = self.layout.global_rank == 0
        verdict = self._root_cause(None) if first else self._without_first()
        if first:
            self._publish("end", verdict)
        if str(verdict):
            print(f"toolkit: {self._with_hint(verdict)}", file=sys.stderr, flush=True)
        _kill_children()
        os._exit(verdict.exit_code)

    def _is_over(self, parent: int | None) -> bool:
        """Whether a process that this one depends on is seen to have ended."""
        return self._over_elsewhere.is_set() or bool(self._dead()) or parent not in (None, os.getppid())

    # ---- words at the store

    def _publish(self, key: str, error: BaseException | None = None, prefix: str = "") -> None:
        code = (
            error.exit_code if isinstance(error, CommandError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        )
        with suppress(Exception):  # the store may have ended with rank 0, not answer, or have never been there
            within(_LINGER, lambda: self.store.set(key, f"{code} {'' if error is None else prefix + _text(error)}"))

    def _read(self, key: str) -> tuple[int, str]:
        code, _, text = self.store.get(key).decode().partition(" ")
        return int(code), text

    def _read_rank0(self, seconds: float) -> tuple[int, str] | None:
        """Return the exit code and the text of rank 0; None where it does not say any."""
        deadline = time.monotonic() + seconds

        def hear() -> tuple[int, str] | None:
            while time.monotonic() < deadline:
                if self.store.check(["end"]):
                    word = self._read("end")
                    self.store.add("read", 1)
                    return word
                time.sleep(0.05)
            return None

        with suppress(Exception):
            return within(seconds, hear)
        return None


def name_ranks(missing: list[int] | range) -> str:
    return f"rank {missing[0]}" if len(missing) == 1 else f"one of the ranks {', '.join(map(str, missing))}"


def disconnect() -> None:
    """Leave the process group, so that the others notice; not for long, as NCCL may wait for a rank that is gone."""
    if ranks.is_distributed():
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(_LINGER)


def wait_for_children(seconds: float = _LINGER) -> None:
    """Wait for the processes that this one has started to end."""
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0, deadline - time.monotonic()))


def _kill_children() -> None:
    for child in children:
        child.kill()
        child.wait()


def _is_loss(error: BaseException) -> bool:
    """Whether torch says that another process has gone or does not answer."""
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    return type(error) is RuntimeError and "/gloo/" in str(error)  # gloo's own has no class, but the path of its source


def _text(error: BaseException) -> str:
    if isinstance(error, CommandError):
        return str(error)
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of a message, without the C++ stack that torch appends."""
    return (str(error).split(". Exception raised from")[0].strip().splitlines() or [""])[0]
