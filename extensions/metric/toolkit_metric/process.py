"""Call metric functions in processes: they may change global state, exit, hang, or print and return too much."""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from toolkit.checkpoints.find import find_checkpoint_dir, head_of
from toolkit.config.metric_options import MetricArgs
from toolkit.dotted_paths import add_cwd_to_path
from toolkit.errors import UserError, require_option
from toolkit.extension import registered
from toolkit.io.processes import exchange, start_server
from toolkit.io.threads import call_with_timeout, run_in_thread
from toolkit.planning import best_metric
from toolkit.planning.run_args import RunArgs
from toolkit_metric.entries import Metric, Traits, parse_metrics

MAX_BYTES = 1 << 20
"""Limit of what a function may print in a call, in bytes."""
_MAX_RESPONSE = 1 << 26


class MetricKilledError(UserError):
    """A signal ended a metric's process, such as that of the out-of-memory killer: the run may start again."""

    exit_code = 1


class MetricProcess:
    """A process that has loaded a metric function. :meth:`close` ends it.

    Attributes:
        entry: The option with the entry, for messages.

    Args:
        metric: The function.
        seconds: Time limit of each call.
        flag: The option that names the function, for messages.

    Raises:
        UserError: The function cannot be loaded.
    """

    def __init__(self, metric: Metric, seconds: float, flag: str = "--eval.metric") -> None:
        self.metric, self.entry = metric, f"{flag} {metric.entry}"
        self._seconds, self._flag, self._printed = seconds, flag, 0
        add_cwd_to_path()
        self._process = start_server("toolkit_metric.worker", subprocess.PIPE)
        self._forwarded = run_in_thread(self._forward, daemon=True)
        self.traits = Traits(**self._request({"path": metric.path, "argument": metric.argument}))

    def call(
        self, answers: Sequence[Any], references: Sequence[str | None], rows: Sequence[dict[str, Any]]
    ) -> dict[str, float | list[float]]:
        """Return the function's values, by name with the metric's suffix.

        Raises:
            UserError: The function failed, or what it returned is not what :mod:`toolkit_metric.entries` asks for.
        """
        values = self._request([answers, references, rows])["values"]
        return {f"{name}{self.metric.suffix}": value for name, value in values.items()}

    def close(self) -> None:
        """End the process, and those that the function has started."""
        self._kill()
        self._process.wait()
        wait([self._forwarded], 5)

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _request(self, value: Any) -> dict[str, Any]:
        self._printed, error_class = 0, UserError
        line = json.dumps(value, default=str).encode() + b"\n"
        try:
            answer = call_with_timeout(self._seconds, lambda: exchange(self._process, line, _MAX_RESPONSE))
            if answer.endswith(b"\n"):
                response = json.loads(answer)
                if "error" not in response:
                    return response
                reason = response["error"]
            elif self._printed > MAX_BYTES:
                reason = f"printed more than {MAX_BYTES:,} bytes"
            elif answer:
                reason = "returned too much"
            elif (code := self._process.wait()) < 0:
                error_class, reason = MetricKilledError, f"its process was killed by {signal.Signals(-code).name}"
            else:
                reason = f"its process ended (exit code {code})"
        except TimeoutError:
            reason = f"took longer than {self._seconds:g} s ({self._flag}_timeout)"
        self.close()
        raise error_class(f"{self.entry}: {reason}")

    def _forward(self) -> None:
        """Write what the function prints to this process's stderr; end the process if it is too much."""
        pipe = cast(IO[bytes], self._process.stderr)
        while chunk := os.read(pipe.fileno(), 1 << 16):
            self._printed += len(chunk)
            if self._printed > MAX_BYTES:
                self._kill()
                return
            sys.stderr.write(chunk.decode(errors="replace"))


def check_best_by(args: RunArgs, has_callbacks: bool) -> None:
    """Raise UserError if the options already show that no metric has the name of ``--eval.best_by``.

    The names of a user's functions are not known yet.
    """
    metrics = parse_metrics(args.eval.metric)
    built_in = {entry.path for entry in registered("metrics").values() if entry.origin == "toolkit"}
    if any(metric.path not in built_in for metric in metrics):
        return
    names = [(metric.path.rpartition(".")[2], metric.suffix) for metric in metrics]
    names += [("choice_norm", suffix) for name, suffix in names if name == "choice"]
    best_metric.check_best_by(args.eval, args.objective, has_callbacks, map("".join, names))


def check_metrics(evaluation: MetricArgs) -> None:
    """Raise UserError if a function of ``--eval.metric``, a folder or a file cannot be used."""
    for metric in parse_metrics(evaluation.metric):
        MetricProcess(metric, evaluation.metric_timeout).close()
        flag = f"--eval.metric {metric.entry}"
        if metric.entry.partition(":")[0] == "reward":
            folder = find_checkpoint_dir(str(metric.argument), f"{flag}: checkpoint_dir")
            if head_of(folder) is None:
                raise UserError(f"{flag}: has no head; train one with toolkit finetune_full --head reward")
    path = evaluation.metric_data
    require_option(path is None or Path(path).is_file(), "eval.metric_data", path, "no such file")


def summarize(values: dict[str, float | list[float]]) -> dict[str, float]:
    """Return means, with the standard error s / sqrt(n) as NAME_stderr; s is the sample standard deviation."""
    summary: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            summary[name], n = sum(value) / len(value), len(value)
            deviation = statistics.stdev(value) if n > 1 and all(map(math.isfinite, value)) else math.nan
            summary[f"{name}_stderr"] = deviation / math.sqrt(n)
        else:
            summary[name] = value
    return summary
