"""``--max_restarts``: a command in a child process, started again after a crash. Imports no torch."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from toolkit.distributed.launchers import PARENT
from toolkit.distributed.signals import SIGNALS
from toolkit.errors import UserError, notice

_FINAL = (0, 2, 3)  # done, a user's mistake, a guard: again the same


def is_supervised() -> bool:
    """Whether this process is the child of :func:`supervise`, or a rank that it launched."""
    return os.environ.get(PARENT) == str(os.getppid())


def end_with_parent() -> None:
    """In the child of :func:`supervise`: save and end the run if the process that watches it is killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    if "LOCAL_RANK" not in os.environ:  # ranks that this process launches end with it
        threading.Thread(target=watch, daemon=True).start()


def resuming(words: list[str]) -> list[str]:
    """Return the words of a command with ``--resume auto``."""
    pairs = zip(["", *words], words, strict=False)
    kept = [word for before, word in pairs if before != "--resume" and not re.match("--resume(=|$)", word)]
    return [*kept, "--resume", "auto"]


def supervise(words: list[str], max_restarts: int) -> int:
    """Run ``toolkit WORDS``, after a crash again with ``--resume auto``, and return its exit code.

    A run that saved and ended on a signal (128 + signal) does not start again. On several nodes each restarts its own
    processes; all of a run end with the code of its root cause.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError(f"--max_restarts {max_restarts}: torchrun started this process; use torchrun --max_restarts")
    command = [sys.executable, "-m", "toolkit", *words]
    child: subprocess.Popen | None = None
    is_stopped = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        if child is not None:
            child.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # set by nohup
            signal.signal(number, forward)
    for restart in range(max_restarts + 1):
        child = subprocess.Popen(command, env=os.environ | {PARENT: str(os.getpid())})
        code = child.wait()
        if code in _FINAL or code > 128 or is_stopped or restart == max_restarts:
            break
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
        notice(f"toolkit {words[0]}: {how}; restart {restart + 1} of {max_restarts}")
        command = [*command[:3], *resuming(words)]
    return 128 - code if code < 0 else code
