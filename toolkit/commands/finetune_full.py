"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from toolkit.commands.training import trains
from toolkit.planning.training_options import finetune_full

setup = trains(finetune_full)
