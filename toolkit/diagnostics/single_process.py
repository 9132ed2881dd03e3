"""Run the first steps on one device in a child process, so its memory is freed and a crash becomes an error message."""

import io
import multiprocessing
import os
import signal
import threading
import traceback
from contextlib import nullcontext, redirect_stdout
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory

from toolkit.data.loader import exit_with_parent
from toolkit.diagnostics.gradients import GradientRecorder, StepRecord
from toolkit.distributed.world import WorldInfo
from toolkit.errors import CommandError, GuardError, UserError
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.engine import start
from toolkit.training.short_run import short_run_args, single_process_args

_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "TOOLKIT_PARENT_PID")
_RANKS = ("RANK", "NODE_RANK", "WORLD_SIZE")


def run_single_process(
    args: RunArgs, steps: int, device: str, micro_batch_size: int | None = None, quiet: bool = False
) -> list[StepRecord]:
    """Train the first ``steps`` of a run on one device and return their records.

    ``micro_batch_size`` overrides the run's. Errors of the child process are raised here, with the prefix
    "one process: ".
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, args, steps, device, micro_batch_size, quiet))
    process.start()
    sender.close()
    try:
        records, code, message = receiver.recv()
    except EOFError:
        process.join()
        number = -(process.exitcode or 0)
        how = f"was killed by {signal.Signals(number).name}" if number > 0 else f"exited with code {-number}"
        hint = "; possibly out of memory (see troubleshooting: out of memory)" if number == signal.SIGKILL else ""
        raise CommandError(f"one process: {how}{hint}") from None
    process.join()
    if records is not None:
        return records
    error = {2: UserError, 3: GuardError}.get(code, CommandError)(f"one process: {message}")
    error.exit_code = code
    raise error


def is_launcher_variable(name: str) -> bool:
    """Whether a launcher such as torchrun or SLURM sets this environment variable for its processes."""
    return name.startswith(_LAUNCHERS) or name in _RANKS


def _run(sender: Connection, args: RunArgs, steps: int, device: str, micro_batch_size: int | None, quiet: bool) -> None:
    threading.Thread(target=exit_with_parent, daemon=True).start()
    for name in list(os.environ):
        if is_launcher_variable(name):
            del os.environ[name]
    try:
        with redirect_stdout(io.StringIO()) if quiet else nullcontext():
            sender.send((_train(args, steps, device, micro_batch_size), 0, ""))
    except KeyboardInterrupt:
        pass  # Ctrl-C in the terminal also interrupts the parent
    except CommandError as error:
        sender.send((None, error.exit_code, str(error)))
    except Exception as error:
        traceback.print_exc()
        sender.send((None, 1, f"{type(error).__name__}: {error}"))


def _train(args: RunArgs, steps: int, device: str, micro_batch_size: int | None) -> list[StepRecord]:
    recorder = GradientRecorder()
    with TemporaryDirectory(prefix="toolkit-") as folder:
        args = single_process_args(short_run_args(args, steps, folder), micro_batch_size)
        world = WorldInfo(1, 1, 0, 0, "toolkit", starts_processes=False)
        config = resolve_auto(args, DeviceSpec.of_this_machine(device))
        start(config, world, [*load_callbacks(args.callbacks), recorder], is_short=True)
    return recorder.records
