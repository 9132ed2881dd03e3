"""The energy of a run, from a fake powercap folder and a fake NVML."""

import re
import sys
from math import isnan
from types import SimpleNamespace

import pytest
import torch
from helpers.cases import check_each
from helpers.groups import free_port, start_ranks
from toolkit_report import energy
from toolkit_report.energy import Counter, Energy, find_cpus, find_gpu
from toolkit_report.run import read_run
from toolkit_report.text import figures
from torch import distributed as dist

from tests.training.test_run import arguments
from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.hf.card import write_model_card
from toolkit.config import LogArgs
from toolkit.errors import UserError
from toolkit.training.callbacks import Callback
from toolkit.training.engine import run_training
from toolkit.ui.energy import describe_energy
from toolkit.ui.events import EVENTS, parse_events

CPU, RANGE = torch.device("cpu"), 262_143_328_850  # microjoules


class Machine:
    """A powercap folder of two packages with memory, and zones that others contain."""

    def __init__(self, folder) -> None:
        self.folder = folder
        zones = {
            "intel-rapl:0": "package-0", "intel-rapl:0:0": "core", "intel-rapl:0:1": "dram",
            "intel-rapl:1": "package-1", "intel-rapl:2": "psys", "intel-rapl-mmio:0": "package-0",
        }  # fmt: skip
        for zone, name in zones.items():
            (folder / zone).mkdir(parents=True)
            (folder / zone / "name").write_text(f"{name}\n")
            (folder / zone / "max_energy_range_uj").write_text(f"{RANGE}\n")
            self.set(zone, RANGE - 1_000_000)

    def set(self, zone: str, value: int) -> None:
        (self.folder / zone / "energy_uj").write_text(f"{value}\n")

    def use(self, joules: int) -> None:
        for zone in self.folder.iterdir():
            value = int((zone / "energy_uj").read_text()) + joules * 1_000_000
            self.set(zone.name, value % RANGE)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "powercap")
    return Machine(tmp_path / "powercap")


def test_packages_and_memory_are_summed_once_and_counters_wrap(machine):
    counters = find_cpus()
    machine.use(3)  # each wraps
    assert sum(counter.update() for counter in counters) == pytest.approx(9)
    machine.use(5)
    assert sum(counter.update() for counter in counters) == pytest.approx(24)


def test_what_cannot_be_read_is_not_available(machine, monkeypatch):
    meter = Energy(CPU)
    machine.use(1)
    assert meter._update() == {"CPUs": pytest.approx(3)}
    (machine.folder / "intel-rapl:1" / "energy_uj").write_text("no number")
    assert isnan(meter._update()["CPUs"]) and isnan(Energy(CPU)._update()["CPUs"])
    (machine.folder / "intel-rapl:1" / "energy_uj").unlink()
    assert find_cpus() == []
    monkeypatch.setattr(energy, "POWERCAP", machine.folder / "missing")
    assert find_cpus() == []


def test_a_gpu_is_read_by_its_uuid(monkeypatch):
    used = {"GPU-a": 5_000, "GPU-b": 7_000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-b": "GPU-b"}[uuid],
        nvmlDeviceGetTotalEnergyConsumption=used.__getitem__,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="b"))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter = Energy(torch.device("cuda", 1))
    used["GPU-b"] += 2_500  # millijoules
    assert meter._update()["GPUs"] == 2.5
    del used["GPU-b"]
    assert isnan(meter._update()["GPUs"])
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert find_gpu(torch.device("cuda", 1)) == []


def test_launches_are_summed_and_described():
    def event(launch, **values):
        return {"kind": "energy", "launch": launch} | values

    def check(events, text):
        assert describe_energy(events) == text

    first, more = event(1, CPUs=1800.0, GPUs=3600.0), event(1, CPUs=3600.0, GPUs=36000.0)
    check_each(check, [
        ([], ""),
        ([event(1, CPUs=None)], ""),
        ([first, more, event(2, CPUs=3600.0, GPUs=0.0, price=None)], "12.00 Wh (GPUs 10.00 Wh, CPUs 2.00 Wh)"),
        ([more | {"price": 300}], "11.00 Wh (GPUs 10.00 Wh, CPUs 1.00 Wh); 3.30 at 300 per kWh"),
        ([more, event(2, CPUs=3600.0, GPUs=None)], "2.00 Wh (GPUs not available, CPUs 2.00 Wh)"),
        ([event(1, CPUs=7.2e6)], "2,000.00 Wh (CPUs 2,000.00 Wh)"),
        ([event(1, CPUs="x", GPUs=[1]), {"kind": "energy"}], ""),
    ])  # fmt: skip


def record_on_rank(rank: int, port: int, folder, n_missing: int, n_machines: int) -> None:
    store = dist.TCPStore("localhost", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if n_machines > 1:
        energy.boot_id = lambda: f"machine {rank}"
    energy.find_cpus = lambda: [Counter(iter([0.0, 5.0]).__next__)]
    meter = Energy(CPU)
    values = iter([0.0, 10.0 + rank])
    gpus = [] if rank < n_missing else [Counter(lambda: next(values))]
    meter._counters.append(("GPUs", gpus))
    trainer = SimpleNamespace(out_dir=folder, args=SimpleNamespace(log=LogArgs()))
    meter.on_checkpoint_saved(trainer, folder)
    dist.destroy_process_group()


@pytest.mark.parametrize(("n_missing", "n_machines"), [(0, 1), (1, 2)])
def test_each_gpu_and_each_machine_counts_once(tmp_path, n_missing, n_machines):
    """Ranks of two nodes may be in containers of one machine."""
    start_ranks(record_on_rank, (free_port(), tmp_path, n_missing, n_machines), 2)
    (event,) = parse_events((tmp_path / EVENTS).read_bytes())
    assert (event["GPUs"], event["CPUs"]) == (None if n_missing else 21.0, 5.0 * n_machines)


class Uses(Callback):
    """Uses 3 x 1,200 J in each step."""

    def __init__(self, machine) -> None:
        self.machine = machine

    def on_step_end(self, trainer, metrics) -> None:
        self.machine.use(1200)


def card_of(out, folder) -> str:
    write_model_card(folder / "card.md", read_model_config(out / "final"), out / "final", has_tokenizer=True)
    return (folder / "card.md").read_text()


def test_summary_report_and_card_have_the_energy_of_all_launches(machine, corpus, tmp_path, capsys):
    def run(steps, **options):
        run_training(arguments(corpus, out, train={"max_steps": steps}, resume="auto", **options), [Uses(machine)])
        return re.findall("energy: (.*)", capsys.readouterr().out)

    out = tmp_path / "run"
    assert run(2) == ["2.00 Wh (CPUs 2.00 Wh)"]
    text = "3.00 Wh (CPUs 3.00 Wh); 0.90 at 300 per kWh"
    assert run(3, log=LogArgs(price=300.0)) == [text]
    assert figures(read_run(out))["energy"] == text and text in (out / "report.html").read_text()
    assert f"| Energy | {text} |" in card_of(out, tmp_path)


def test_energy_is_not_mentioned_without_counters(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(energy, "POWERCAP", tmp_path / "missing")
    run_training(arguments(corpus, tmp_path / "run", train={"max_steps": 1}))
    assert "energy: " not in capsys.readouterr().out
    assert "energy" not in figures(read_run(tmp_path / "run"))
    assert "Energy" not in card_of(tmp_path / "run", tmp_path)
    assert '"energy"' not in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    run_training(arguments(corpus, tmp_path / "priced", train={"max_steps": 1}, log=LogArgs(price=1.0)))
    assert "energy: not available" in capsys.readouterr().out
    with pytest.raises(UserError, match="--log.price 0.0: must be greater than zero"):
        LogArgs(price=0.0)
