"""Coordinated shutdown of a run's processes, with one message and the exit code of the root cause.

A failing rank publishes its error at the store, then leaves the process group, which wakes ranks that wait in a
collective. Rank 0 determines the root cause and reports it. The other ranks end silently unless rank 0 itself is lost.
"""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

from torch import distributed as dist

from toolkit.distributed import ranks
from toolkit.distributed.launchers import PARENT
from toolkit.distributed.lifeline import Lifeline
from toolkit.distributed.rendezvous import FAILED
from toolkit.distributed.world import WorldInfo
from toolkit.errors import (
    CallbackError,
    CommandError,
    PeerLostError,
    PeerShutdownError,
    first_line,
    mark_reported,
    notice,
)
from toolkit.io.tempfiles import is_alive
from toolkit.io.threads import call_with_timeout

EXIT_TIMEOUT_S = 5.0  # for the processes of a failed run to exit
KILL_AFTER_S = 30.0  # then a hanging process of a failed run is killed
_ABORTING = "; aborting (see troubleshooting: hanging)"

_GLOO = ("/gloo/", "Application timeout caused pair closure")
"""gloo's errors name a source path; the errors of operations after its timeout do not."""

children: list[subprocess.Popen] = []
"""Processes of local ranks 1, 2, ..., in the process that launched them."""


class ShutdownCoordinator:
    """Coordinates this process's shutdown with the other processes.

    Attributes:
        lifeline: Connections to rank 0, from the rendezvous until the process group exists.
        store: Where ranks publish errors, from the rendezvous on.
    """

    def __init__(self, world: WorldInfo) -> None:
        self.world = world
        self.lifeline: Lifeline | None = None
        self.store: Any = None
        self._started, self._done, self._peer_ended = threading.Event(), threading.Event(), threading.Event()
        self._others = range(1, world.world_size)
        self.resume_hint = lambda: "--resume auto continues from the latest checkpoint, if one was saved"

    @property
    def is_reporter(self) -> bool:
        """Whether this process prints messages for its node if rank 0 is lost."""
        return self.world.local_rank == 0 or self.world.global_rank == 1

    def peer_ended(self) -> bool:
        """Whether another process has ended."""
        return bool(self._describe_lost_peer()) or self.store.check(["ended"])

    def end(self, error: BaseException) -> NoReturn:
        """Publish why this process ends, determine the root cause, and raise the error to report here."""
        if isinstance(error, PeerLostError) and error.__cause__ is not None:
            error = error.__cause__  # the root cause is on this rank
        self._started.set()
        try:
            verdict = self._end_rank0(error) if self.world.global_rank == 0 else self._end_other(error)
        finally:
            wait_for_children(EXIT_TIMEOUT_S if self.store is not None else 0)
            _kill_children()
            self._done.set()
        mark_reported(verdict)
        raise self._with_hint(verdict) from verdict.__cause__

    def _with_hint(self, verdict: BaseException) -> BaseException:
        """Add a resume hint to the message about a lost process."""
        if str(verdict).endswith(_ABORTING):
            verdict.args = (f"{verdict}. {self.resume_hint()}",)
        return verdict

    def _end_rank0(self, error: BaseException) -> BaseException:
        self._publish("ended")
        disconnect()
        if _is_peer_loss(error):
            error = self._root_cause(error)
        self._publish("end", error)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        with suppress(Exception):  # this process hosts the store: keep it until the other nodes have read it
            while len(children) < len(self._others) and self.store.add("read", 0) < len(self._others):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        return error

    def _end_other(self, error: BaseException) -> BaseException:
        rank, is_own_error, lost_peer = self.world.global_rank, not _is_peer_loss(error), self._describe_lost_peer()
        if is_own_error:
            self._publish(f"left/{rank}", error, f"rank {rank}: ")
        else:
            self._publish(f"left/{rank}", PeerLostError(lost_peer) if lost_peer else None)
        self._publish("ended")
        disconnect()
        is_expected = not is_own_error or isinstance(error, CommandError | KeyboardInterrupt)
        verdict = self._read_rank0(2 * EXIT_TIMEOUT_S if is_expected else 1.0)
        if verdict is not None and (is_expected or verdict[1] == _text(error)):  # report a common error once
            return PeerShutdownError(verdict[0])
        if self.store is None and self.world.local_rank != 0:  # before the rendezvous: one line per node
            return PeerShutdownError(getattr(error, "exit_code", 1))
        return error if is_own_error else self._rank0_lost()

    def _rank0_lost(self) -> CommandError:
        return PeerLostError(f"lost contact with rank 0{_ABORTING}") if self.is_reporter else PeerShutdownError(1)

    def _root_cause(self, error: BaseException | None) -> PeerLostError:
        """Return the root cause: the error that a rank published, or after a short wait what this rank observes."""
        deadline, ended = time.monotonic() + EXIT_TIMEOUT_S / 2, list[int]()
        while time.monotonic() < deadline:
            lost_peer = self._describe_lost_peer()
            with suppress(Exception):
                ended = [rank for rank in self._others if self.store.check([f"left/{rank}"])]
                failed = [FAILED] if self.store.check([FAILED]) else []
                for code, text in [self._read(key) for key in failed + [f"left/{rank}" for rank in ended]]:
                    if text:
                        cause = PeerLostError(text)
                        cause.exit_code = code
                        return cause
            if lost_peer or len(ended) == len(self._others):
                break
            time.sleep(0.05)
        if lost_peer := self._describe_lost_peer():
            return PeerLostError(lost_peer)
        if isinstance(error, PeerLostError):
            return error
        names = name_ranks([rank for rank in self._others if rank not in ended] or self._others)
        if "imed out" in str(error):
            return PeerLostError(f"no answer from {names} for {ranks.timeout() / 60:g} minutes (--timeout){_ABORTING}")
        return PeerLostError(f"lost contact with {names}{_ABORTING}")

    def _describe_lost_peer(self) -> str:
        """Return which process exited and how, as seen from here; empty while all are running."""
        codes = {self.world.global_rank + i: child.poll() for i, child in enumerate(children, 1)}
        exited = sorted((code, rank) for rank, code in codes.items() if code is not None)
        if not exited:
            lost = set() if self.lifeline is None else self.lifeline.lost - codes.keys()
            return f"rank {min(lost)} exited or its node is unreachable{_ABORTING}" if lost else ""
        code, rank = exited[0]  # killed ranks first: the others may have exited as a consequence
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return f"rank {rank} {how}{_ABORTING}"

    # ---- watchdog

    def watch(self) -> None:
        """Start the watchdog. It exits this process if another process has exited and this one hangs."""
        for task in (self._watch, self._listen):
            threading.Thread(target=task, daemon=True).start()

    def _listen(self) -> None:
        """Detect that another node has exited. Runs in a separate thread, because an unresponsive store blocks."""
        while not self._done.wait(0.5) and not self._peer_ended.is_set():
            with suppress(Exception):  # there is no store yet; a lost one is reported where it is needed
                if self.store.check(["ended"]):
                    self._peer_ended.set()

    def done(self) -> None:
        self._done.set()

    def _watch(self) -> None:
        parent = int(os.environ.get(PARENT, 0))
        is_child = os.getppid() == parent  # not of an inherited variable, nor if the launcher was killed before this
        while not (self._started.is_set() or self._run_has_ended() or self._launcher_has_ended(parent, is_child)):
            if self._done.wait(0.5):
                return
        if self._done.wait(KILL_AFTER_S):
            return
        is_rank0 = self.world.global_rank == 0
        verdict = self._root_cause(None) if is_rank0 else self._rank0_lost()
        if is_rank0:
            self._publish("end", verdict)
        if str(verdict):
            notice(f"toolkit: {self._with_hint(verdict)}")
        _kill_children()
        os._exit(verdict.exit_code)

    def _run_has_ended(self) -> bool:
        return self._peer_ended.is_set() or bool(self._describe_lost_peer())

    def _launcher_has_ended(self, parent: int, is_child: bool) -> bool:
        return os.getppid() != parent and (is_child or (self.world.local_rank > 0 < parent and not is_alive(parent)))

    # ---- messages at the store

    def _publish(self, key: str, error: BaseException | None = None, prefix: str = "") -> None:
        code = (
            error.exit_code if isinstance(error, CommandError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        )
        with suppress(Exception):  # the store may be missing, unresponsive, or lost with rank 0
            call_with_timeout(
                EXIT_TIMEOUT_S, lambda: self.store.set(key, f"{code} {'' if error is None else prefix + _text(error)}")
            )

    def _read(self, key: str) -> tuple[int, str]:
        code, _, text = self.store.get(key).decode().partition(" ")
        return int(code), text

    def _read_rank0(self, seconds: float) -> tuple[int, str] | None:
        """Return the exit code and message of rank 0; None if it publishes none in time."""
        deadline = time.monotonic() + seconds

        def poll() -> tuple[int, str] | None:
            while time.monotonic() < deadline:
                if self.store.check(["end"]):
                    verdict = self._read("end")
                    self.store.add("read", 1)
                    return verdict
                time.sleep(0.05)
            return None

        with suppress(Exception):
            return call_with_timeout(seconds, poll)
        return None


def name_ranks(missing: list[int] | range) -> str:
    return f"rank {missing[0]}" if len(missing) == 1 else f"one of the ranks {', '.join(map(str, missing))}"


def disconnect() -> None:
    """Leave the process group to wake the other ranks. Has a time limit, because NCCL may wait for a lost rank."""
    if ranks.is_distributed():
        with suppress(Exception):
            call_with_timeout(EXIT_TIMEOUT_S, dist.destroy_process_group)


def wait_for_children(seconds: float = EXIT_TIMEOUT_S) -> None:
    """Wait up to ``seconds`` for the processes that this one launched."""
    deadline = time.monotonic() + seconds
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0, deadline - time.monotonic()))


def _kill_children() -> None:
    for child in children:
        child.kill()
        child.wait()


def _is_peer_loss(error: BaseException) -> bool:
    """Whether torch reports that another process exited or does not respond."""
    if isinstance(error, CallbackError) and error.__cause__ is not None:  # in a callback's collective
        error = error.__cause__
    if isinstance(error, PeerLostError | dist.DistError):
        return True
    return type(error) is RuntimeError and any(text in str(error) for text in _GLOO)


def _text(error: BaseException) -> str:
    if isinstance(error, CommandError):
        return str(error)
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {first_line(error)}"
