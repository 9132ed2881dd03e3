"""Clip the gradient and update the weights. A run chooses one :class:`Update` when it is built.

torch's fused Adam and AdamW divide gradients by ``grad_scale`` and skip the update if ``found_inf`` is set, as for
``torch.amp.GradScaler``. :class:`FusedUpdate` uses this to clip without a pass over the gradients, and the host reads
norm and loss later. :class:`Update` divides in the same way, so updates of fp32 weights are equal with and without a
gradient callback.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from toolkit.distributed.fabric import gradient_norm, knows_gradient_norm
from toolkit.distributed.private_lightning import FabricModule
from toolkit.optim.bf16 import BF16Optimizer
from toolkit.private_torch import divide_, tensor_norms


class Update:
    """Clips the gradient, and updates the weights after the host has checked that norm and loss are finite.

    Args:
        model, optimizer: The objects that Fabric returned.
        max_norm: Clip the norm of the gradient to this; None or 0 does not clip.
        before_update: Called when the gradient is complete, checked and clipped.
        is_spike: Decides from loss and gradient norm whether the update is skipped.
    """

    skipped = False
    """Whether the last update was skipped as a spike."""

    def __init__(
        self,
        fabric: Fabric,
        model: FabricModule,
        optimizer: Any,
        max_norm: float | None,
        before_update: Callable[[], None] | None = None,
        is_spike: Callable[[float, float], bool] | None = None,
    ) -> None:
        self.fabric, self.model, self.optimizer = fabric, model, optimizer
        self.max_norm, self.before_update, self.is_spike = max_norm or math.inf, before_update, is_spike
        self.scaler = getattr(fabric.strategy.precision, "scaler", None)

    def norm(self) -> Tensor:
        """Complete the reduction of the gradient and clip it.

        Returns:
            The gradient norm before clipping, an fp32 scalar, the same on every rank.
        """
        if not norm_before_clip(self.fabric):
            # max_norm=inf computes the norm without clipping
            norm: Any = self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.max_norm, error_if_nonfinite=False
            )
            return norm
        norm = gradient_norm(self.fabric, self.model, self.optimizer)
        if math.isfinite(self.max_norm):
            clip_gradients(self.optimizer, norm, self.max_norm)
        return norm

    def apply(
        self, totals: Tensor, n_checked: int, overlap: Callable[[], None], mean_loss: Callable[[list[float]], float]
    ) -> Callable[[], list[float]]:
        """Update the weights if the first ``n_checked`` totals are finite (N7), and free the gradients.

        Args:
            totals: The norm, then sums of losses; fp32, the same on every rank.
            overlap: Host work to do before the host waits for the device.
            mean_loss: Returns the loss for the totals.

        Returns:
            A function that returns the totals as floats. Reading them is the step's only host synchronization.
        """
        overlap()
        values = totals.tolist()
        if self.accepts(values[:n_checked]):
            is_checked = self.is_spike is not None and math.isfinite(values[0])
            self.skipped = is_checked and self.is_spike(mean_loss(values), values[0])  # type: ignore[misc]
            if not self.skipped:
                if self.before_update is not None:
                    self.before_update()
                self.optimizer.step()  # a scaler skips the update if the gradient is not finite
            else:
                self.model.zero_grad(set_to_none=True)  # with FSDP the optimizer's step would free these gradients
                if self.scaler is not None:
                    self.scaler.update()  # otherwise it refuses to unscale the next gradient
            self.optimizer.zero_grad(set_to_none=True)
        return lambda: values

    def accepts(self, values: list[float]) -> bool:
        """Whether the losses are finite, and the norm if no GradScaler checks it."""
        return all(map(math.isfinite, values[1:] if self.scaler is not None else values))


class FusedUpdate(Update):
    """Clips, checks and updates on the device; the host reads afterwards.

    The host may read a step's totals after it has launched the next step: after a step that is not finite, the device
    refuses all later updates.

    Attributes:
        fault: fp32 scalar on the device: 1 after a step that is not finite, else 0. None before the first step.
    """

    fault: Tensor | None = None

    @staticmethod
    def supports(fabric: Fabric, optimizer: Any) -> bool:
        """Whether the fused step of Fabric's ``optimizer`` can clip and check; a subclass of Adam's may not."""
        inner = optimizer.optimizer
        if type(inner) not in (Adam, AdamW) or not norm_before_clip(fabric):
            return False
        is_fused = all(group["fused"] for group in inner.param_groups) and fabric.device.type in ("cpu", "cuda")
        # the update of offloaded weights runs on the CPU, which would have to wait for the norm
        return is_fused and all(p.device == fabric.device for group in inner.param_groups for p in group["params"])

    def norm(self) -> Tensor:
        return gradient_norm(self.fabric, self.model, self.optimizer)

    def apply(
        self, totals: Tensor, n_checked: int, overlap: Callable[[], None], mean_loss: Callable[[list[float]], float]
    ) -> Callable[[], list[float]]:
        inner = self.optimizer.optimizer
        fault = 1.0 - totals[:n_checked].isfinite().all().float()
        self.fault = inner.found_inf = fault if self.fault is None else torch.maximum(fault, self.fault)
        inner.grad_scale = _divisor(totals[0], self.max_norm) if math.isfinite(self.max_norm) else None
        try:
            self.optimizer.step()
        finally:
            del inner.found_inf, inner.grad_scale
        self.optimizer.zero_grad(set_to_none=True)
        read = _read_later(totals)
        overlap()
        return read


class BackwardUpdate(Update):
    """Updates each weight in the backward pass and frees its gradient (``--optimizer.in_backward``).

    Weights and state are bit-identical to ``optimizer.step()``, because torch's optimizers update each parameter
    independently. Checkpoints do not depend on this option.

    N7: a check on the host would synchronize at every parameter. Instead, the device sets a gradient with NaN or Inf to
    zero. :meth:`norm` is then not finite, and the run stops before anything is saved.
    """

    def __init__(self, fabric: Fabric, model: FabricModule, optimizer: Any, max_norm: float | None) -> None:
        super().__init__(fabric, model, optimizer, max_norm)
        self._inner = optimizer.optimizer
        self._parameters = [p for group in self._inner.param_groups for p in group["params"]]
        self._norms: dict[int, Tensor] = {}  # norms in this step, by parameter id
        for group in self._inner.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._update, group))

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        norm = tensor_norms([parameter.grad])[0]
        self._norms[id(parameter)] = norm
        parameter.grad.masked_fill_(~norm.isfinite(), 0.0)
        groups = self._inner.param_groups
        self._inner.param_groups = [{**group, "params": [parameter]}]
        try:
            self._inner.step()
        finally:
            self._inner.param_groups = groups
        parameter.grad = None

    def norm(self) -> Tensor:
        norms = [self._norms[id(p)] for p in self._parameters if id(p) in self._norms]
        self._norms = {}
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def apply(
        self, totals: Tensor, n_checked: int, overlap: Callable[[], None], mean_loss: Callable[[list[float]], float]
    ) -> Callable[[], list[float]]:
        overlap()
        values = totals.tolist()
        return lambda: values


def choose_update(
    fabric: Fabric,
    model: FabricModule,
    optimizer: Any,
    max_norm: float | None,
    *,
    before_update: Callable[[], None] | None = None,
    is_spike: Callable[[float, float], bool] | None = None,
    in_backward: bool = False,
) -> Update:
    """Return the fastest update that the optimizer and the strategy support; see :class:`Update` for the arguments."""
    if in_backward:
        return BackwardUpdate(fabric, model, optimizer, max_norm)
    if before_update is None and is_spike is None and FusedUpdate.supports(fabric, optimizer):
        return FusedUpdate(fabric, model, optimizer, max_norm)
    return Update(fabric, model, optimizer, max_norm, before_update, is_spike)


def norm_before_clip(fabric: Fabric) -> bool:
    """Whether the norm is available before clipping. False with a GradScaler or an extension's strategy."""
    return getattr(fabric.strategy.precision, "scaler", None) is None and knows_gradient_norm(fabric)


def clip_gradients(optimizer: Any, norm: Tensor, max_norm: float) -> None:
    """Clip the gradients of Fabric's ``optimizer``, in place or in the next step. ``norm`` is an fp32 scalar."""
    divisor = _divisor(norm, max_norm)
    if isinstance(optimizer.optimizer, BF16Optimizer) and optimizer.optimizer.has_masters:
        optimizer.optimizer.divisor = divisor  # gradients may be bf16, which dividing would round again
        return
    by_device: dict[torch.device, list[Tensor]] = {}  # offloaded gradients are in CPU memory
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter.grad is not None:
            by_device.setdefault(parameter.grad.device, []).append(parameter.grad)
    for device, gradients in by_device.items():
        divide_(gradients, divisor.to(device))


def set_learning_rate(optimizer: Any, learning_rate: float) -> None:
    """Set the learning rate of all groups, times a group's ``lr_ratio``."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_ratio", 1.0)


def _read_later(totals: Tensor) -> Callable[[], list[float]]:
    """Copy to the host without waiting. The returned function waits for this copy, not for what is launched later."""
    if totals.device.type != "cuda":
        return totals.tolist
    copied, event = totals.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()

    def read() -> list[float]:
        event.synchronize()
        return copied.tolist()

    return read


def _divisor(norm: Tensor, max_norm: float) -> Tensor:
    return ((norm + 1e-6) / max_norm).clamp(min=1.0)
