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

from toolkit.config import EvalArgs
from toolkit.errors import UserError, require_option, require_package
from toolkit.extension import add_cwd_to_path
from toolkit.io.processes import exchange, start_server
from toolkit.io.threads import call_with_timeout, run_in_thread
from toolkit.metrics import Metric, parse_metrics

MAX_BYTES = 1 << 20
"""Limit of what a function may print in a call, in bytes."""
_MAX_RESPONSE = 1 << 26


class MetricProcess:
    """A process that has loaded a metric function. :meth:`close` ends it.

    Args:
        metric: The function.
        seconds: Time limit of each call.

    Raises:
        UserError: The function cannot be loaded.
    """

    def __init__(self, metric: Metric, seconds: float) -> None:
        self.metric, self._seconds, self._printed = metric, seconds, 0
        add_cwd_to_path()
        self._process = start_server("toolkit.metrics.worker", subprocess.PIPE)
        self._forwarded = run_in_thread(self._forward, daemon=True)
        loaded = self._request({"path": metric.path, "argument": metric.argument})
        self.needs_log_probs: bool = loaded["needs_log_probs"]
        self.needs_prompts: bool = loaded["needs_prompts"]

    def call(
        self, answers: Sequence[Any], references: Sequence[str | None], rows: Sequence[dict[str, Any]]
    ) -> dict[str, float | list[float]]:
        """Return the function's values, by name with the metric's suffix.

        Raises:
            UserError: The function failed, or what it returned is not what :mod:`toolkit.metrics` asks for.
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
        self._printed = 0
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
            else:
                reason = "returned too much" if answer else f"its process ended (exit code {self._process.wait()})"
        except TimeoutError:
            reason = f"took longer than {self._seconds:g} s (--eval.metric_timeout)"
        self.close()
        raise UserError(f"--eval.metric {self.metric.entry}: {reason}")

    def _forward(self) -> None:
        """Write what the function prints to this process's stderr; end the process if it is too much."""
        pipe = cast(IO[bytes], self._process.stderr)
        while chunk := os.read(pipe.fileno(), 1 << 16):
            self._printed += len(chunk)
            if self._printed > MAX_BYTES:
                self._kill()
                return
            sys.stderr.write(chunk.decode(errors="replace"))


def check_metrics(evaluation: EvalArgs) -> None:
    """Raise UserError if a function of ``--eval.metric``, a file or a package cannot be used."""
    for metric in parse_metrics(evaluation.metric):
        MetricProcess(metric, evaluation.metric_timeout).close()
    path = evaluation.metric_data
    require_option(path is None or Path(path).is_file(), "eval.metric_data", path, "no such file")
    if evaluation.tasks is not None:
        require_package(f"--eval.tasks {evaluation.tasks}", "lm_eval", "0.4.9.2")


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
