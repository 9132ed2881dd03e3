"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from __future__ import annotations

from toolkit.commands.training import trains
from toolkit.planning.training_options import finetune_full

setup = trains(finetune_full)
