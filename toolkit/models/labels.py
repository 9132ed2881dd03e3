"""Label conventions. No torch: data preparation does not need it."""

IGNORE_INDEX = -100  # label of tokens excluded from the loss, PyTorch's default
