"""Training objectives. Imports no torch, because the command line lists the objectives."""

from toolkit.objectives.base import Objective, Part
from toolkit.objectives.distillation import Distillation
from toolkit.objectives.next_token import NextToken

__all__ = ["Distillation", "NextToken", "Objective", "Part"]
