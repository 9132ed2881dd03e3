"""Run the first steps on one device in a child process, so its memory is freed and a crash becomes an error message."""

import io
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, redirect_stdout
from tempfile import TemporaryDirectory

from toolkit.data.loader import exit_with_parent
from toolkit.distributed.launchers import is_launcher_variable
from toolkit.distributed.world import WorldInfo
from toolkit.errors import CommandError
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.engine import start
from toolkit_doctor.gradients import GradientRecorder, StepRecord
from toolkit_doctor.short_run import short_run_args, single_process_args


def run_single_process(
    args: RunArgs, steps: int, device: str, micro_batch_size: int | None = None, quiet: bool = False
) -> list[StepRecord]:
    """Train the first ``steps`` of a run on one device and return their records.

    ``micro_batch_size`` overrides the run's. Errors of the child process are raised here, users' with the prefix
    "one process: ".
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_train, args, steps, device, micro_batch_size, quiet).result()
        except CommandError as error:
            error.args = (f"one process: {error}",)
            raise
        except BrokenProcessPool as error:
            hint = "possibly out of memory (see troubleshooting: out of memory)"
            raise CommandError(f"one process: was killed or crashed; {hint}") from error


def _train(args: RunArgs, steps: int, device: str, micro_batch_size: int | None, quiet: bool) -> list[StepRecord]:
    threading.Thread(target=exit_with_parent, daemon=True).start()
    for name in filter(is_launcher_variable, list(os.environ)):
        del os.environ[name]
    recorder = GradientRecorder()
    with TemporaryDirectory(prefix="toolkit-") as folder, redirect_stdout(io.StringIO()) if quiet else nullcontext():
        args = single_process_args(short_run_args(args, steps, folder), micro_batch_size)
        world = WorldInfo(1, 1, 0, 0, "toolkit", starts_processes=False)
        config = resolve_auto(args, DeviceSpec.of_this_machine(device))
        start(config, world, [*load_callbacks(args.callbacks), recorder], is_short=True)
    return recorder.records
