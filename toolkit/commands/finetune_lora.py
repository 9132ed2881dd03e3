"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from toolkit.commands.training import training_command
from toolkit.planning.training_options import finetune_lora

setup = training_command(finetune_lora)
