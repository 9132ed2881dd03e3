"""Conventions of labels and counts. No torch: data preparation does not need it."""

IGNORE_INDEX = -100  # label of tokens excluded from the loss, PyTorch's default
TOKENS = "tokens"  # the count of supervised tokens
