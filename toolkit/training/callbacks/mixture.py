"""Log the share of each source of a :class:`toolkit.data.Mixture`."""

from typing import TYPE_CHECKING

from toolkit.training.run import Callback, Metrics, Run, late

if TYPE_CHECKING:
    from toolkit.data.interleave import MixtureOrder


class MixtureShares(Callback):
    """Adds each source's share of the tokens so far to the metrics; reports shares and epochs at the end."""

    def __init__(self, order: "MixtureOrder") -> None:
        self.order = order
        self.columns = tuple(f"share_{name}" for name in order.weights)

    @late
    def on_log(self, trainer: Run, metrics: Metrics) -> None:
        shares = self.order.shares(trainer.progress.samples)
        metrics |= {f"share_{name}": share for name, share in shares.items()}

    def on_train_end(self, trainer: Run) -> None:
        position = trainer.progress.samples
        epochs, shares = self.order.epochs(position), self.order.shares(position)
        if not shares:
            return  # the run has ended before its first step with these weights
        for name, weight in self.order.weights.items():
            often = "" if epochs[name] is None else f"; read {epochs[name]:.4g} times in this run"
            trainer.display.message(f"source {name}: {shares[name]:.3%} of the tokens, weight {weight:.3%}{often}")
