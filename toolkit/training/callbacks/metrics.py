"""Measure throughput and write metrics to ``logs/metrics.csv``, and other loggers."""

from typing import Any

import torch

from toolkit.distributed import ranks
from toolkit.errors import one_line
from toolkit.training.hyperparameters import hyperparameters
from toolkit.training.run import Callback, Metrics, Run, late
from toolkit.training.throughput import StepTimes, Throughput, peak_memory_gb
from toolkit.ui.events import environment, write_event
from toolkit.ui.loggers import MetricsCSV, log_metrics


class ThroughputMonitor(Callback):
    """Adds tokens_per_sec, mfu (if the device's peak FLOP/s is known), peak_memory_gb and step times to every row."""

    columns = ("tokens_per_sec", "mfu", "peak_memory_gb", *StepTimes.COLUMNS)

    def __init__(self, throughput: Throughput) -> None:
        self.throughput = throughput

    @late
    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        self.throughput.add(int(metrics["step_tokens"]), metrics["step_seconds"])

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        if "loss" in metrics:  # none for a validation before the first step
            metrics |= self.throughput.read() | {"peak_memory_gb": peak_memory_gb(trainer.fabric.device)}
            metrics |= trainer.step_times.read()


class MetricsFile(Callback):
    """Writes metrics.csv and events.jsonl, on rank 0."""

    def __init__(self, csv: MetricsCSV) -> None:
        self.csv = csv

    def on_train_start(self, trainer: Run) -> None:
        config, args, model = trainer.config, trainer.args, trainer.spec
        device = trainer.fabric.device
        write_event(
            trainer.out_dir,
            "launch",
            model=model.config and model.config.name,
            parameters=model.meta_model and sum(p.numel() for p in model.meta_model.parameters()),
            devices=f"{ranks.world_size()} x {torch.cuda.get_device_name(device) if device.type == 'cuda' else device}",
            batch=str(config.batch),
            precision=config.precision,
            strategy=str(config.strategy),
            environment=environment(),
            is_repeatable=args.is_repeatable,
            settings=hyperparameters(args.requested or args),
        )
        self._record_remarks(trainer)

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        self.csv.write(metrics)
        self._record_remarks(trainer)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._finish(trainer, one_line(error) or type(error).__name__)

    def on_train_end(self, trainer: Run) -> None:
        self._finish(trainer)

    def _finish(self, trainer: Run, error: str = "") -> None:
        self.csv.close()
        self._record_remarks(trainer)
        write_event(trainer.out_dir, "end", error=error)

    def _record_remarks(self, trainer: Run) -> None:
        remarks = trainer.display.remarks
        while remarks:
            write_event(trainer.out_dir, "warning", step=trainer.progress.step, text=remarks.pop(0))


class ExternalLoggers(Callback):
    """Passes metrics to the loggers of ``--logger_name`` on rank 0."""

    def __init__(self, loggers: list[Any]) -> None:
        self.loggers = loggers

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        axes = ("step", "tokens", "seconds")
        log_metrics(self.loggers, {k: v for k, v in metrics.items() if k not in axes}, trainer.progress.step)

    def on_exception(self, trainer: Run, error: BaseException) -> None:
        self._finalize("failed")

    def on_train_end(self, trainer: Run) -> None:
        self._finalize("success")

    def _finalize(self, status: str) -> None:
        for logger in self.loggers:
            logger.finalize(status)
