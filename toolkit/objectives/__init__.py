"""Training objectives, each imported on first use. Imports no torch, because the command line lists the objectives."""

from typing import TYPE_CHECKING

from toolkit.extension import import_by_name
from toolkit.objectives.base import Objective, Part
from toolkit.objectives.next_token import NextToken

if TYPE_CHECKING:
    from toolkit.objectives.distillation import Distillation
    from toolkit.objectives.kto import KTO
    from toolkit.objectives.preference import DPO, ORPO, SimPO
    from toolkit.objectives.scores import HEADS, Classification, Reward, TokenReward

__all__ = [
    "DPO", "HEADS", "KTO", "ORPO", "Classification", "Distillation", "NextToken", "Objective", "Part", "Reward",
    "SimPO", "TokenReward",
]  # fmt: skip

_HOMES = {
    "distillation": "Distillation",
    "kto": "KTO",
    "next_token": "NextToken",
    "preference": "DPO ORPO SimPO",
    "scores": "Classification Reward TokenReward",
}
CLASSES = {name: f"{__name__}.{home}.{name}" for home, names in _HOMES.items() for name in names.split()}
"""The dotted paths of toolkit's objectives, by name, for ``--objective``."""

__getattr__ = import_by_name(__name__, CLASSES | {"HEADS": f"{__name__}.scores.HEADS"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
