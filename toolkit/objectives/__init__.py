"""Training objectives. Imports no torch, because the command line lists the objectives."""

from toolkit.extension import import_by_name
from toolkit.objectives.base import Objective, Part
from toolkit.objectives.next_token import NextToken

__all__ = ["NextToken", "Objective", "Part"]

CLASSES = {"NextToken": f"{__name__}.next_token.NextToken"}
"""The dotted paths of the core's objectives, by name, for ``--objective``."""

__getattr__ = import_by_name(__name__, CLASSES)
