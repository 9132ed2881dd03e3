"""``--compiler thunder``: compile the blocks with ``thunder.jit``, under any of toolkit's strategies."""

import warnings
from collections.abc import Hashable, Mapping
from typing import Any

from torch import nn

from toolkit.models.gpt import GPT, Block
from toolkit_thunder.kernel import Kernel, slots_of, structure_of
from toolkit_thunder.options import ThunderArgs
from toolkit_thunder.units import Unit


def compile_blocks(
    module: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    longest_ragged: int,
    groups: Mapping[str, Any],
) -> None:
    """Compile the blocks in place: their class and the names of their weights stay as they are.

    Blocks of toolkit that differ only in their weights are compiled once. Thunder compiles anew for each length of the
    rows, and for validation. Not tried on CUDA.

    Args:
        module: The model.
        blocks: The classes of its blocks.
        longest_ragged: Tokens of the longest row, where rows differ in length; else 0.
        groups: Options of extensions by group.

    Raises:
        UserError: Thunder cannot compile the blocks, or an executor is unknown.
    """
    if longest_ragged:
        warnings.warn("rows differ in length: Thunder compiles each length anew (seconds per length)", stacklevel=2)
    if isinstance(module, GPT):
        module.uses_kernels = False  # blocks get masks, which Thunder can trace
    options: ThunderArgs = groups.get("thunder", ThunderArgs())
    kernels: dict[Hashable, Kernel] = {}
    for name, part in module.named_modules():
        if isinstance(part, blocks):
            key = structure_of(part) if type(part) is Block else id(part)
            if key not in kernels:
                kernels[key] = Kernel(part, name.replace(".", "_") or "model", options.executor_names)
            part.forward = Unit(part, slots_of(part), kernels[key])
