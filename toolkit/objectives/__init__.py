"""Training objectives. Imports no torch, because the command line lists the objectives."""

from toolkit.objectives.base import Objective, Part
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.kto import KTO
from toolkit.objectives.next_token import NextToken
from toolkit.objectives.preference import DPO, ORPO, SimPO
from toolkit.objectives.scores import HEADS, Classification, Reward, TokenReward

__all__ = [
    "DPO", "HEADS", "KTO", "ORPO", "Classification", "Distillation", "NextToken", "Objective", "Part", "Reward",
    "SimPO", "TokenReward",
]  # fmt: skip
