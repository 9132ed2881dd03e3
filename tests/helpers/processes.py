"""Commands as real processes, with several ranks and nodes."""

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar, NamedTuple, Union

from lightning.fabric.strategies.launchers import subprocess_script
from toolkit_doctor import single_process

from helpers.groups import SERVER, start_server
from helpers.small_runs import text_data
from helpers.surroundings import short_outputs
from toolkit import cli
from toolkit.distributed.signals import ignore_until_exit

PRETRAIN = ["-m", "toolkit", "pretrain", "pico-llama", "--accelerator", "cpu"]
TRAIN = {"global_batch_size": 8, "micro_batch_size": 2, "max_seq_length": 32, "max_steps": 100_000}
LAUNCHERS = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TOOLKIT_PARENT_PID")


Process = Union[subprocess.Popen, "Forked"]


def flags_for(corpus: Path, out: Path, **train) -> list[str]:
    return text_data(corpus) + common_flags(out, **train)


def common_flags(out: Path, **train) -> list[str]:
    flags = ["--out_dir", str(out), "--resume", "auto", "--eval.interval", "0", "--eval.final_validation", "false"]
    return flags + [part for name, value in (TRAIN | train).items() for part in (f"--train.{name}", str(value))]


def failing(out: Path, rank: int, how: str) -> list[str]:
    data = ["--data", "helpers.failing_data.Fails", "--data.rank", str(rank), "--data.how", how]
    return [*data, "--data.vocab_size", "300", *common_flags(out)]


def clean(environ: dict[str, str]) -> dict[str, str]:
    """Return the environment without launchers' variables and with these."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])  # tests/
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environ


def start(*arguments: str, **environ: str) -> subprocess.Popen:
    """Start Python in a new process group, as a terminal would."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, *arguments], env=clean(environ), **pipes)


def pretrain(*flags: str, **environ: str) -> "Forked":
    """Start ``toolkit pretrain``, forked where torch is imported; ``start(*PRETRAIN, ...)`` is the real command."""
    return Forked([*PRETRAIN[2:], *flags], **environ)


class Task(NamedTuple):
    """What a forked process runs; see Forked."""

    arguments: list[str]
    script: Path | None
    n_ranks: int
    folder: str


class Forked:
    """A toolkit command in a new process group, with the interface of subprocess.Popen.

    The process is forked from a server that has imported torch, which takes seconds, and so are its other ranks.

    Args:
        arguments: Of the command, or of ``script``.
        script: Runs instead of the command.
        n_ranks: Ranks that it starts, itself among them; by default as --devices says.
    """

    def __init__(
        self, arguments: list[str], script: Path | None = None, n_ranks: int | None = None, **environ: str
    ) -> None:
        start_server()
        (out, child_out), (err, child_err) = SERVER.Pipe(duplex=False), SERVER.Pipe(duplex=False)
        if n_ranks is None:
            words = " ".join(arguments).replace("--devices=", "--devices ").split()
            n_ranks = int(words[words.index("--devices") + 1]) if "--devices" in words else 1
        task = Task(arguments, script, n_ranks, os.getcwd())
        self._process = SERVER.Process(target=run_command, args=(task, clean(environ), child_out, child_err))
        self._process.start()
        for connection in (child_out, child_err):
            connection.close()
        self.pid = self._process.pid
        self.stdout, self.stderr = (os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") for pipe in (out, err))
        self._readers: list[threading.Thread] = []
        self._texts = ["", ""]
        self._reaping = threading.Lock()  # of two threads that ask for the exit code at once, one would get 255

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with self._reaping:
            return self._process.exitcode

    def wait(self) -> int:
        with self._reaping:
            self._process.join()
            return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in (0, 1)]
            for reader in self._readers:
                reader.start()
        deadline = None if timeout is None else time.monotonic() + timeout
        for reader in self._readers:
            reader.join(None if deadline is None else max(0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired("toolkit", timeout)
        self.wait()
        return self._texts[0], self._texts[1]

    def _read(self, index: int) -> None:
        self._texts[index] = (self.stdout, self.stderr)[index].read()


class ForkedRank(subprocess.Popen):
    """A process of another rank that a command starts: it was forked before the command ran, and has waited since."""

    waiting: ClassVar[list[tuple[int, Connection]]] = []
    """PIDs of such processes, and where they get their environment."""

    @classmethod
    def fork(cls, environ: dict[str, str]) -> dict[str, str]:
        """Fork one. Return the environment to run the command with: ``environ``, or in the new process its own."""
        receiver, sender = multiprocessing.Pipe(duplex=False)
        if pid := os.fork():
            receiver.close()
            cls.waiting.append((pid, sender))
            return environ
        sender.close()
        cls.waiting.clear()
        try:
            return receiver.recv()
        except EOFError:  # the command has ended without it
            os._exit(0)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others) -> None:
        self.pid, sender = self.waiting.pop(0)
        self._child_created = True
        sender.send(env)


def run_command(task: Task, environ: dict[str, str], out: Connection, err: Connection) -> None:
    """Run a command in a forked process as a separate process would."""
    os.setsid()
    os.chdir(task.folder)
    for connection, descriptor in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), descriptor)
        connection.close()
    if "LOCAL_RANK" not in environ and "SLURM_PROCID" not in environ:  # it starts its other ranks itself
        me = os.getpid()
        for _ in range(1, task.n_ranks):
            if os.getpid() == me:
                environ = ForkedRank.fork(environ)
        subprocess_script.subprocess = SimpleNamespace(Popen=ForkedRank)
    os.environ.clear()
    os.environ |= environ
    sys.argv = [str(task.script or Path(sys.executable).with_name("toolkit")), *task.arguments]
    sys.modules["__main__"].__spec__ = None
    multiprocessing.set_start_method(None, force=True)  # the platform's own, not this process's
    # it would start a process that imports torch
    single_process.multiprocessing = SimpleNamespace(get_context=lambda _: SERVER)
    with short_outputs():
        code = run_script(task.script) if task.script else cli.main(task.arguments)
    ignore_until_exit()  # as main() does where no program calls it
    atexit._run_exitfuncs()
    sys.exit(code)


def run_script(script: Path) -> int:
    sys.path.insert(0, str(script.parent))
    module = ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    try:
        exec(compile(script.read_text(), script, "exec"), vars(module))
    except SystemExit as end:
        return end.code or 0
    return 0


def group_members(process: Process) -> list[int]:
    """Return the running processes of the group that a process leads."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, leader = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has exited in the meantime
            continue
        if int(leader) == process.pid and state != "Z":
            found.append(int(stat.parent.name))
    return sorted(found)


def child_of(process: Process) -> int:
    (child,) = set(group_members(process)) - {process.pid}
    return child


def finish(process: Process, seconds: float = 300) -> tuple[str, str]:
    """Wait until all processes have ended; return their stdout and stderr.

    The limit ends a hang and nothing else: on a busy machine, two processes need more than a minute to start.
    """
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        left = group_members(process)
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"{left} did not end: {process.communicate()}") from None
    closed = time.monotonic()
    # the pipes close shortly before the last of them ends
    while group_members(process) and time.monotonic() - closed < 10:
        time.sleep(0.05)
    assert group_members(process) == []
    return out, err


def ended(process: Process, code: int, *texts: str, within: float = 60) -> str:
    """Check the exit code and that stderr is one line with the texts; return stdout."""
    out, err = finish(process, within)
    assert process.returncode == code, err
    assert len(err.splitlines()) == 1 and err.startswith("toolkit pretrain: "), err
    for text in texts:
        assert text in err
    return out


def folders(out: Path) -> set[str]:
    return {path.name for path in out.iterdir() if (path / "COMPLETE").exists()}
