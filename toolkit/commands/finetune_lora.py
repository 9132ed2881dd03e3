"""`toolkit finetune_lora`: train low-rank adapters on the frozen weights of a checkpoint."""

from toolkit.commands.training import train
from toolkit.planning.training_options import FinetuneLoRAOptions


def setup(options: FinetuneLoRAOptions) -> None:
    """Train low-rank adapters on the frozen weights of a checkpoint; 3 epochs by default."""
    train(options)
