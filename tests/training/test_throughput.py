from dataclasses import replace
from types import SimpleNamespace

import torch

from toolkit.models.families import get_config
from toolkit.training.callbacks.metrics import ThroughputMonitor
from toolkit.training.model_spec import ModelSpec, describe_model
from toolkit.training.throughput import StepTimes, Throughput, peak_memory_gb


def test_n8_throughput_since_the_last_read():
    counter = Throughput(flops_per_token=10.0, peak_flops=1000.0)
    counter.add(100, 1.0)
    counter.add(100, 3.0)
    assert counter.read() == {"tokens_per_sec": 50.0, "mfu": 0.5}
    counter.add(30, 1.0)
    assert counter.read()["tokens_per_sec"] == 30.0
    assert Throughput(10.0, None).read().keys() == {"tokens_per_sec"}


def test_n8_monitor_declares_the_columns_that_it_adds():
    monitor, trainer = (
        ThroughputMonitor(Throughput(10.0, 1000.0)),
        SimpleNamespace(fabric=SimpleNamespace(), run=SimpleNamespace()),
    )
    trainer.fabric.device, trainer.step_times = torch.device("cpu"), StepTimes()
    trainer.step_times.add([[0, 0]], 1.0)
    monitor.on_step_end(trainer, {"step_tokens": 100, "step_seconds": 1.0})
    metrics = {"loss": 1.0}
    monitor.on_log(trainer, metrics)
    assert metrics.keys() - {"loss"} == set(monitor.columns)


def test_n8_peak_memory_of_the_process():
    assert 0.1 < peak_memory_gb(torch.device("cpu")) < 24


def test_model_without_a_name_is_described_by_its_class():
    config = replace(get_config("pico-llama").with_vocab_size(64), name="")
    assert describe_model(ModelSpec(config), 8).startswith("GPT: ")
