"""Constants for labels and token counts. Does not import torch, which data preparation does not need."""

IGNORE_INDEX = -100  # label of tokens excluded from the loss, PyTorch's default
TOKENS = "tokens"  # name of the supervised-token count
