"""``--optimizer.in_backward``: update each weight during the backward pass, and free its gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.distributed.private_torch import tensor_norms


class StepInBackward:
    """Steps one optimizer parameter by parameter, in hooks of the backward pass.

    Its state is the same as after ``optimizer.step()``, bit for bit: torch's optimizers update each parameter by
    itself. So checkpoints do not depend on it.

    N7: whether a gradient is finite is known on the device only, and asking would wait for it at every parameter. A
    gradient with NaN or Inf is therefore set to zero there; :meth:`pop_norm` is not finite then, and the run stops
    before anything is saved.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._norms: dict[int, Tensor] = {}  # by id of the parameter
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._update, group))

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        assert parameter.grad is not None
        norm = tensor_norms([parameter.grad])[0]
        self._norms[id(parameter)] = norm
        parameter.grad.masked_fill_(~norm.isfinite(), 0.0)
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**group, "params": [parameter]}]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        parameter.grad = None

    def pop_norm(self) -> Tensor:
        """Return the norm of the complete gradient since the last call, a scalar tensor, as clipping computes it."""
        norms = [self._norms[id(p)] for p in self._parameters if id(p) in self._norms]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
