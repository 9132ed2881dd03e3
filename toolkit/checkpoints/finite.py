"""N7 finite-or-stop, of what is saved: weights and optimizer state without NaN or Inf."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.checkpoints.fingerprint import ADAPTERS
from toolkit.checkpoints.manifest import DamagedCheckpointError
from toolkit.checkpoints.weights import canonical_name, load_state, load_weights, named_tensors
from toolkit.errors import UserError

_SHOWN = 5


def nonfinite_tensors(tensors: Mapping[str, Tensor], weights: Collection[str] = ()) -> list[str]:
    """Return the names of the tensors that contain NaN or Inf, after one pass over them on their own device.

    So do ``weights`` whose norm is beyond float32: every product with them would be Inf.
    """
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return []
    norms = torch._foreach_norm([t.detach() for t in floats.values()])  # the fastest pass that NaN and Inf survive
    finite = torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().tolist()
    suspects = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
    return [name for name in suspects if not _is_sound(floats[name], name in weights)]  # a norm can overflow, too


def _is_sound(tensor: Tensor, is_weight: bool) -> bool:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool((torch.linalg.vector_norm(tensor.detach(), dtype=wide) if is_weight else tensor).isfinite().all())


def nonfinite_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of this rank's trained weights, and ``weight|key`` of the optimizer's state, that contain NaN or
    Inf.

    Numbers of the optimizer that are no tensor of at least one dimension do not count: some begin at infinity.
    """
    weights, moments = {}, {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = canonical_name(name)
            weights[name] = _local(parameter)
            state = optimizer.state.get(parameter, {})
            moments |= {f"{name}|{k}": _local(v) for k, v in state.items() if isinstance(v, Tensor) and v.ndim}
    return nonfinite_tensors(weights | moments, weights.keys())


def require_finite(folder: Path) -> None:
    """Read all of a checkpoint that has no manifest: it may be of a version that saved what is not finite.

    Raises:
        DamagedCheckpointError: naming tensors with NaN or Inf, or a file that cannot be read.
    """
    try:
        weights = load_state(folder / ADAPTERS) if (folder / ADAPTERS).is_file() else load_weights(folder)
        found = nonfinite_tensors(weights, weights.keys())
        state = dict(named_tensors(load_state(folder / "trainer" / "state.pth"), "trainer/state.pth"))
        if (folder / "trainer" / "optimizer").is_dir():
            from toolkit.checkpoints.sharded import read_sharded  # it takes a second to import

            state |= read_sharded(folder / "trainer" / "optimizer")
        found += nonfinite_tensors({name: tensor for name, tensor in state.items() if tensor.ndim})
    except UserError as error:
        raise DamagedCheckpointError(str(error)) from error
    if found:
        raise DamagedCheckpointError(
            f"{folder}: damaged: NaN or Inf in {shown(found)}; resume from an older checkpoint"
        )


def shown(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nonfinite_warning(names: list[str], folder: object) -> str:
    """One line about the tensors with NaN or Inf in a folder that a conversion has written."""
    return f"warning: NaN or Inf in {len(names)} tensor(s) of {folder}: {shown(names)}"
