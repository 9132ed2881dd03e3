"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from toolkit.commands.training import trains
from toolkit.planning.training_options import finetune_lora

setup = trains(finetune_lora)
