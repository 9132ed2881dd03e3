"""`toolkit finetune_full`: finetune all weights of a checkpoint on instructions or text."""

from toolkit.commands.training import train
from toolkit.planning.training_options import FinetuneFullOptions


def setup(options: FinetuneFullOptions) -> None:
    """Finetune all weights of a checkpoint on instructions or text; 3 epochs by default."""
    train(options)
