"""Parameter names without the prefixes that wrappers add."""

# DDP, FSDP, torch.compile, activation checkpointing and Fabric store the wrapped module in these attributes.
_WRAPPERS = {"module", "_forward_module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Remove wrapper attributes from a parameter name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
