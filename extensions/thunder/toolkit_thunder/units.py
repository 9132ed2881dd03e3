"""Units that fetch their parameters together: each compiled block is a unit, and the rest is the root unit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from toolkit.models.block import Block
from toolkit_thunder.kernel import Kernel, Slot, plain_arguments, slots_of

Fetch = Callable[[Tensor], Tensor]


class Unit:
    """Replaces the forward of a module: ``module.forward = Unit(module, ...)``.

    Args:
        module: The module.
        slots: The unit's parameters.
        kernel: The module's compiled forward; None runs it eagerly.
        fetch: Returns the tensor that the kernel uses for a parameter.
        fetch_complete: Returns the tensor that the eager forward uses for a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: list[Slot],
        kernel: Kernel | None,
        fetch: Fetch = lambda parameter: parameter,
        fetch_complete: Fetch = lambda parameter: parameter,
    ) -> None:
        self._module, self._slots, self._kernel = module, slots, kernel
        self._eager, self._fetch, self._fetch_complete = module.forward, fetch, fetch_complete

    def __call__(self, *args: Any, **options: Any) -> Any:
        kernel = self._kernel
        if kernel is not None and isinstance(self._module, Block):
            plain = plain_arguments(*args, **options)
            kernel, args, options = (None, args, options) if plain is None else (kernel, plain, {})
        if kernel is not None:
            values = self._fetched(self._fetch)
            return kernel(self._slots, values, self._module.training, *args, **options)
        with _replaced(self._slots, self._fetched(self._fetch_complete)):
            return self._eager(*args, **options)

    def _fetched(self, fetch: Fetch) -> list[Tensor]:
        """Return a value for each slot. Tied parameters share a value."""
        values: dict[int, Tensor] = {}
        parameters = [slot.get() for slot in self._slots]
        for parameter in parameters:
            if id(parameter) not in values:
                values[id(parameter)] = fetch(parameter)
        return [values[id(parameter)] for parameter in parameters]


@contextmanager
def _replaced(slots: list[Slot], values: list[Tensor]) -> Iterator[None]:
    """Context that replaces parameters by other tensors."""
    tensors = [slot.get() for slot in slots]
    try:
        for slot, value in zip(slots, values, strict=True):
            slot.owner._parameters[slot.attribute] = value  # type: ignore[assignment]
        yield
    finally:
        for slot, parameter in zip(slots, tensors, strict=True):
            slot.owner._parameters[slot.attribute] = parameter  # type: ignore[assignment]


def install_units(
    module: nn.Module,
    blocks: tuple[type[nn.Module], ...],
    make_kernel: Callable[[nn.Module, str], Kernel | None],
    fetch: Fetch,
    fetch_complete: Fetch,
) -> None:
    """Make each block a unit, and everything else the root unit, which is not compiled.

    Without blocks, the complete module is one unit.

    Args:
        module: The model. Replaces ``forward`` of the module and its blocks; parameter names do not change.
        blocks: The block classes.
        make_kernel: Compiles a block, given the block and its name.
        fetch, fetch_complete: See :class:`Unit`. The root unit uses ``fetch_complete``.
    """
    units = {name: part for name, part in module.named_modules() if isinstance(part, blocks)} if blocks else {}
    units = units or {"": module}
    for name, part in units.items():
        kernel = make_kernel(part, name.replace(".", "_") or "model")
        part.forward = Unit(part, slots_of(part), kernel, fetch, fetch_complete)
    outside = [slot for slot in slots_of(module) if not _is_inside(slot, list(units))]
    if outside:
        module.forward = Unit(module, outside, None, fetch, fetch_complete)


def _is_inside(slot: Slot, units: Sequence[str]) -> bool:
    return any(not name or slot.name.startswith(f"{name}.") for name in units)
