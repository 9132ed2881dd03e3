"""Names of parameters without what strategies and compilers add."""

from __future__ import annotations

# DDP, FSDP, torch.compile, activation checkpointing and Fabric wrap modules in attributes of these names.
_WRAPPERS = {"module", "_forward_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Return a parameter's name without the attributes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
