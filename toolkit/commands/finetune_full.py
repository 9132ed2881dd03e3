"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from toolkit.commands.training import training_command
from toolkit.planning.training_options import finetune_full

setup = training_command(finetune_full)
