"""Skip the update of steps whose loss or gradient is a spike, for ``--train.skip_spikes``."""

from collections import deque
from statistics import fmean, stdev
from typing import Any

from toolkit.training.run import Callback, Metrics, Run

WINDOW = 128


class SkipSpikes(Callback):
    """OLMo's rule: a spike is more than ``sigma`` standard deviations over the mean of the last steps.

    The window has the losses and gradient norms of the last :data:`WINDOW` steps, skipped ones included, so that a
    lasting change is accepted after a while. Until it is half full, no step is skipped.
    """

    columns = ("skipped_steps",)

    def __init__(self, sigma: float) -> None:
        self.sigma, self.skipped, self.reason = sigma, 0, ""
        self.windows = {name: deque[float](maxlen=WINDOW) for name in ("loss", "grad_norm")}

    def is_spike(self, loss: float, grad_norm: float) -> bool:
        """Whether to skip a step, decided from values that are the same on every rank. Adds them to the window."""
        self.reason = ""
        for (name, window), value in zip(self.windows.items(), (loss, grad_norm), strict=True):
            if len(window) >= WINDOW // 2 and value - (mean := fmean(window)) > self.sigma * (std := stdev(window)):
                self.reason = f"{name} {value:.4g} is over {mean:.4g} + {self.sigma:g} x {std:.4g}"
            window.append(value)
        self.skipped += bool(self.reason)
        return bool(self.reason)

    def on_step_end(self, trainer: Run, metrics: Metrics) -> None:
        if self.reason:
            trainer.display.message(f"note: step {trainer.progress.step} is skipped: {self.reason}")

    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        metrics["skipped_steps"] = self.skipped

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped} | {name: list(window) for name, window in self.windows.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped = state["skipped"]
        for name, window in self.windows.items():
            window.extend(state[name])
