"""Measure throughput and write metrics to ``logs/metrics.csv``, its plot and other loggers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from toolkit.distributed import ranks
from toolkit.errors import one_line
from toolkit.reporting.events import EventLog, environment
from toolkit.reporting.page import REPORT, write_report
from toolkit.training.callbacks.base import Callback
from toolkit.training.throughput import StepTimes, Throughput, peak_memory_gb
from toolkit.ui.loggers import MetricsCSV, log_metrics
from toolkit.ui.plots import plot_loss

if TYPE_CHECKING:
    from toolkit.training.trainer import Trainer


class ThroughputMonitor(Callback):
    """Adds tokens_per_sec, mfu (if the device's peak FLOP/s is known), peak_memory_gb and step times to every row."""

    columns = ("tokens_per_sec", "mfu", "peak_memory_gb", *StepTimes.COLUMNS)

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    def on_step_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.throughput.add(int(metrics["step_tokens"]), metrics["step_seconds"])

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        if "loss" in metrics:  # none for a validation before the first step
            metrics |= self.throughput.read() | {"peak_memory_gb": peak_memory_gb(trainer.fabric.device)}
            metrics |= trainer.run.step_times.read()


class MetricsFile(Callback):
    """Writes metrics.csv and events.jsonl, and loss.png and report.html at the end, on rank 0."""

    def __init__(self, csv: MetricsCSV, events: EventLog) -> None:
        self.csv, self.events = csv, events

    def on_train_start(self, trainer: Trainer) -> None:
        config, args, model = trainer.config, trainer.args, trainer.run.state.model.meta_model
        device = trainer.fabric.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self.events.write(
            "launch",
            environment=environment(),
            devices=f"{ranks.world_size()} x {name}",
            precision=config.precision,
            strategy=config.strategy.kind,
            parameters=None if model is None else sum(p.numel() for p in model.parameters()),
            is_repeatable=args.is_repeatable,
            settings=config.hyperparameters() if args.is_repeatable else None,
        )

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        self.csv.write(metrics)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        reason = one_line(error) or type(error).__name__
        self.events.write("end", error=reason)
        self._close(trainer, f"stopped: {reason}")

    def on_train_end(self, trainer: Trainer) -> None:
        self.events.write("end")
        self._close(trainer, "finished")

    def _close(self, trainer: Trainer, status: str) -> None:
        self.csv.close()
        plot_run(trainer.out_dir)
        if (problem := write_report(trainer.out_dir, status)) is not None:
            trainer.display.message(f"note: {REPORT} was not written: {problem}")


def is_plot_current(out_dir: Path) -> bool:
    """Whether ``loss.png`` exists and is not older than the metrics. A run may be killed before it draws the plot."""
    csv, plot = out_dir / "logs" / "metrics.csv", out_dir / "loss.png"
    return plot.exists() and not (csv.exists() and plot.stat().st_mtime_ns < csv.stat().st_mtime_ns)


def plot_run(out_dir: Path) -> None:
    """Write ``loss.png``."""
    plot_loss(out_dir / "logs" / "metrics.csv", out_dir / "loss.png")


class ExternalLoggers(Callback):
    """Passes metrics to the loggers of ``--logger_name`` on rank 0."""

    def __init__(self, loggers: list[Any]) -> None:
        self.loggers = loggers

    def on_log(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        axes = ("step", "tokens", "seconds")
        log_metrics(self.loggers, {k: v for k, v in metrics.items() if k not in axes}, trainer.progress.step)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self._finalize("failed")

    def on_train_end(self, trainer: Trainer) -> None:
        self._finalize("success")

    def _finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)
