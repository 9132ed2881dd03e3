"""The Lion optimizer, and a callback that logs how often its momentum and the gradients have the same sign."""

from toolkit.extension import Extension

# Every command imports this file, so it must not import torch.
EXTENSION = Extension(
    optimizers={"Lion": "toolkit_lion.optimizer.Lion"},
    callbacks={"MomentumAgreement": "toolkit_lion.callback.MomentumAgreement"},
)
