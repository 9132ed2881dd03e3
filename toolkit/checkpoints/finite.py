"""N7 finite-or-stop for checkpoints: check weights and optimizer state for NaN and Inf."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.checkpoints.manifest import DamagedCheckpointError
from toolkit.checkpoints.store import ADAPTERS
from toolkit.checkpoints.weights import Tensors, load_state, load_weights, named_tensors
from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import shard_of
from toolkit.errors import UserError, join_first
from toolkit.private_torch import local_shard, tensor_norms


def nonfinite_tensors(tensors: Mapping[str, Tensor], weights: Collection[str] = ()) -> list[str]:
    """Return the names of tensors that contain NaN or Inf. Each tensor is checked on its device.

    Tensors named in ``weights`` are also listed if their norm overflows float32.
    """
    floats = {name: t for name, t in tensors.items() if t.is_floating_point() and t.numel()}
    if not floats:
        return []
    norms = tensor_norms([t.detach() for t in floats.values()])
    finite = torch.stack([norm.float().to(norms[0].device) for norm in norms]).isfinite().tolist()
    suspects = [name for name, is_finite in zip(floats, finite, strict=True) if not is_finite]
    return [name for name in suspects if not _is_finite(floats[name], name in weights)]  # a finite norm can overflow


def _is_finite(tensor: Tensor, is_weight: bool) -> bool:
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return bool((torch.linalg.vector_norm(tensor.detach(), dtype=wide) if is_weight else tensor).isfinite().all())


def nonfinite_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of this rank's trainable weights and optimizer tensors that contain NaN or Inf.

    Optimizer tensors are named ``weight|key``. Scalars are ignored because some are initialized to infinity.
    """
    weights: Tensors = {}
    moments: Tensors = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            name = canonical_name(name)
            weights[name] = local_shard(parameter)
            state = optimizer.state.get(shard_of(parameter), {})
            moments |= {f"{name}|{k}": local_shard(v) for k, v in state.items() if isinstance(v, Tensor) and v.ndim}
    return nonfinite_tensors(weights | moments, weights.keys())


def require_finite(folder: Path) -> None:
    """Raise DamagedCheckpointError if the weights or trainer state contain NaN or Inf.

    For checkpoints without a manifest, because early versions saved non-finite values.
    """
    try:
        weights = load_state(folder / ADAPTERS) if (folder / ADAPTERS).is_file() else load_weights(folder)
        nonfinite = nonfinite_tensors(weights, weights.keys())
        state = dict(named_tensors(load_state(folder / "trainer" / "state.pth"), "trainer/state.pth"))
        if (folder / "trainer" / "optimizer").is_dir():
            from toolkit.checkpoints.run.sharded import read_sharded  # slow to import (1 s)

            state |= read_sharded(folder / "trainer" / "optimizer")
        nonfinite += nonfinite_tensors({name: tensor for name, tensor in state.items() if tensor.ndim})
    except UserError as error:
        raise DamagedCheckpointError(str(error)) from error
    if nonfinite:
        raise DamagedCheckpointError(
            f"{folder}: damaged: NaN or Inf in {join_first(nonfinite)}; resume from an older checkpoint"
        )


def nonfinite_warning(names: list[str], folder: object) -> str:
    """Return a one-line warning about converted tensors that contain NaN or Inf."""
    return f"warning: NaN or Inf in {len(names)} tensor(s) of {folder}: {join_first(names)}"


def warn_nonfinite(names: list[str], folder: object) -> None:
    """Print the warning of :func:`nonfinite_warning`, if any."""
    if names:
        print(nonfinite_warning(names, folder), file=sys.stderr)
