"""``--compiler thunder``: compile the blocks with ``thunder.jit`` under toolkit's strategies."""

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from toolkit.models.block import Block
from toolkit.models.gpt import GPT
from toolkit_thunder.kernel import Kernel, slots_of, structure_of
from toolkit_thunder.options import ThunderArgs
from toolkit_thunder.units import Unit


def compile_blocks(
    module: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    longest_ragged: int,
    groups: Mapping[str, Any],
) -> None:
    """Compile the blocks in place. Class and weight names do not change.

    toolkit blocks that differ only in their weights share a compilation. Thunder recompiles for each row length and
    for validation. Not tested on CUDA.

    Args:
        module: The model.
        blocks: The block classes.
        longest_ragged: Tokens in the longest row if row lengths vary; otherwise 0.
        groups: Extension options by group.

    Raises:
        UserError: Thunder cannot compile the blocks, or an executor is unknown.
    """
    if longest_ragged:
        warnings.warn("row lengths vary: Thunder recompiles for each length, which takes seconds", stacklevel=2)
    if isinstance(module, GPT):
        module.execute_with(uses_kernels=False)  # blocks get masks, which Thunder can trace
    options: ThunderArgs = groups.get("thunder", ThunderArgs())
    kernels: dict[Hashable, Kernel] = {}
    for name, part in module.named_modules():
        if isinstance(part, blocks):
            key = structure_of(part) if type(part) is Block else id(part)
            if key not in kernels:
                kernels[key] = Kernel(part, name.replace(".", "_") or "model", options.executor_names)
            part.forward = Unit(part, slots_of(part), kernels[key])
