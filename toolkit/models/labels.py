"""What labels mean. No torch, for data is prepared without it."""

IGNORE_INDEX = -100  # the label of a token with nothing to learn, as everywhere in PyTorch
