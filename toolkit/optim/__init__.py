"""Optimizers, learning rate schedules, clipping and parameter groups."""

TORCH_OPTIMIZERS = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "LBFGS", "NAdam", "RAdam", "RMSprop",
    "Rprop", "SGD", "SparseAdam",
)  # fmt: skip
"""Names in torch.optim, for checks without torch."""
HYBRID_OPTIMIZERS = ("Muon", "AdamW8bit")
"""Names of the optimizers in :mod:`toolkit.optim.hybrid`. They are here because that module imports torch."""
PACKAGES = {
    "AdamW8bit": ("bitsandbytes", "0.48"),
    "AdamWScheduleFree": ("schedulefree", "1.4"),
    "SOAP": ("pytorch_optimizer", "4.1"),
}
"""The package of an optimizer, and its lowest version."""
