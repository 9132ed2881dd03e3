"""The optimizer Lion, and a callback that shows how far its momentum and the gradients agree."""

from toolkit.extension import Extension

# Names and where they are. Every command imports this file, so that it imports no torch.
EXTENSION = Extension(
    optimizers={"Lion": "toolkit_lion.optimizer.Lion"},
    callbacks={"MomentumAgreement": "toolkit_lion.callback.MomentumAgreement"},
)
