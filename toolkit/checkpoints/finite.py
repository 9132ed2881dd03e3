"""N7 finite-or-stop for checkpoints: check weights and optimizer state for NaN and Inf."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.checkpoints.weights import Tensors, save_weights
from toolkit.distributed.names import canonical_name
from toolkit.distributed.shards import shard_of
from toolkit.errors import join_first, notice
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


def write_weights(tensors: Iterable[tuple[str, Tensor]], path: Path, folder: Path, is_tied: bool = False) -> None:
    """Write (name, tensor) pairs to one file. Warn of NaN and Inf in weights of ``folder``.

    ``is_tied`` stores the embedding as the head, too.
    """
    weights: Tensors = {}
    nonfinite: list[str] = []
    for name, tensor in tensors:
        weights[name] = tensor
        nonfinite += nonfinite_tensors({name: tensor})
    if is_tied:
        weights["lm_head.weight"] = weights["transformer.wte.weight"]
    save_weights(weights, path)
    warn_nonfinite(nonfinite, folder)


def warn_nonfinite(names: list[str], path: Path) -> None:
    """Print a warning about converted tensors that contain NaN or Inf, if there are any."""
    if names:
        notice(f"warning: NaN or Inf in {len(names)} tensor(s) of {path}: {join_first(names)}")
