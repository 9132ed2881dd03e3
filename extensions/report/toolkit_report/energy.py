"""Measure the energy of a run: of GPUs by NVML, of CPUs and their memory by RAPL (Linux)."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.distributed import ranks
from toolkit.io.safe_parse import read_bounded
from toolkit.io.tempfiles import boot_id
from toolkit.training.launch import Launch
from toolkit.training.run import Callback, Metrics, Run, late
from toolkit.ui.energy import energy_of_run
from toolkit.ui.events import write_event

POWERCAP = Path("/sys/class/powercap")
INTERVAL_S = 60.0
"""Seconds between readings: RAPL's counters start again at zero, in some minutes at full power."""


class Counter:
    """A counter of energy.

    Args:
        read: Returns joules.
        wraps_at: Joules at which the counter starts again at zero.
    """

    def __init__(self, read: Callable[[], float], wraps_at: float = math.inf) -> None:
        self._read, self._wraps_at = read, wraps_at
        self._last, self.joules = read(), 0.0

    def update(self) -> float:
        """Return the energy since the start in joules; NaN if the counter has failed."""
        try:
            now = self._read()
        except Exception:  # of NVML, or of a file
            now = math.nan
        self.joules += (now - self._last) % self._wraps_at
        self._last = now
        return self.joules


class Energy(Callback):
    """Records the energy of this launch at every checkpoint and at the end; the summary has the total of all launches.

    Each rank reads its GPU, and the first rank of a machine the CPUs. Collective.
    """

    def __init__(self, device: torch.device) -> None:
        self._counters = [("GPUs", find_gpu(device))] if device.type == "cuda" else []
        machines = ranks.all_gather_object(boot_id())  # nodes of a run may be containers of one machine
        if machines.index(machines[ranks.global_rank()]) == ranks.global_rank():
            self._counters.append(("CPUs", find_cpus()))
        self._launch, self._read_at = time.time(), time.monotonic()

    @late
    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        if time.monotonic() - self._read_at > INTERVAL_S:
            self._update()

    def on_checkpoint_saved(self, trainer: Run, folder: Path) -> None:
        totals: dict[str, float] = {}
        for local in ranks.all_gather_object(self._update()):
            for kind, joules in local.items():
                totals[kind] = totals.get(kind, 0.0) + joules
        if ranks.global_rank() == 0 and any(map(math.isfinite, totals.values())):
            values = {kind: None if math.isnan(joules) else joules for kind, joules in totals.items()}
            write_event(trainer.out_dir, "energy", launch=self._launch, price=trainer.args.log.price, **values)

    def on_train_end(self, trainer: Run) -> None:
        energy = energy_of_run(trainer.out_dir)
        if energy or trainer.args.log.price is not None:
            trainer.display.message(f"energy: {energy or 'not available'}")

    def _update(self) -> dict[str, float]:
        """Return the joules so far by kind of device; NaN if a counter is missing or has failed."""
        self._read_at = time.monotonic()
        return {kind: sum(c.update() for c in counters) if counters else math.nan for kind, counters in self._counters}


def make_energy(launch: Launch, stack: ExitStack) -> list[Callable[[Any], Energy]]:
    """Return the callback of a run, built with the model: what its launch used before is not measured."""
    return [lambda checkpointer: Energy(launch.fabric.device)]


def find_gpu(device: torch.device) -> list[Counter]:
    """Return the counter of a GPU; empty without the package nvidia-ml-py, or if the GPU has none."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return [Counter(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)]
    except Exception:  # NVML's errors, or no package
        return []


def find_cpus() -> list[Counter]:
    """Return the counters of this machine's CPUs and their memory; empty if one is unreadable, as for most users."""
    counters = []
    try:
        for zone in sorted(POWERCAP.glob("intel-rapl:*")):
            if read_bounded(zone / "name").startswith((b"package", b"dram")):
                limit = _read_joules(zone / "max_energy_range_uj")
                counters.append(Counter(partial(_read_joules, zone / "energy_uj"), limit))
    except (OSError, ValueError):
        return []
    return counters


def _read_joules(file: Path) -> float:
    return int(read_bounded(file)) / 1e6
