"""Read other tools' checkpoints and adapters, by what extensions register: :class:`Importer`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from toolkit.checkpoints.weights import Tensors
from toolkit.errors import UserError
from toolkit.extension import load_registered, missing_built_in, registered
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.lora_config import LoRAConfig


class ImportedAdapters(NamedTuple):
    """The configuration of adapters, their fp32 tensors by native name, and lines for the user."""

    lora: LoRAConfig
    tensors: Tensors
    notes: list[str]


@dataclass(frozen=True)
class Importer:
    """What an extension reads of another tool. None: the files are not that tool's.

    Args:
        config: Returns the architecture from the content of a ``model_config.yaml`` that names no family.
        convert: Changes weights with other names or another layout to toolkit's, in place.
        adapters: Reads the adapters in a folder, for ``--from_peft``, given the base's folder and architecture.
    """

    config: Callable[[Fields], ModelConfig | None] = lambda values: None
    convert: Callable[[Tensors, ModelConfig], None] = lambda weights, config: None
    adapters: Callable[[Path, Path, ModelConfig], ImportedAdapters | None] = lambda folder, base, config: None


def _importers() -> Iterator[Importer]:
    for name in reversed(registered("importers")):  # a user's first
        yield load_registered("importers", name)


def import_config(values: Fields) -> ModelConfig:
    """Return the architecture from the content of another tool's ``model_config.yaml``."""
    for importer in _importers():
        if (config := importer.config(values)) is not None:
            return config
    raise UserError(missing_built_in() or "family is missing")


def convert_weights(weights: Tensors, config: ModelConfig) -> None:
    """Change weights that another tool wrote to native names and layout, in place."""
    for importer in _importers():
        importer.convert(weights, config)


def import_adapters(folder: Path, base: Path, config: ModelConfig) -> ImportedAdapters:
    """Read the adapters that ``--from_peft`` names, for the model in ``base``."""
    for importer in _importers():
        if (adapters := importer.adapters(folder, base, config)) is not None:
            return adapters
    hint = missing_built_in() or "holds no adapter_config.json; give a folder that peft wrote"
    raise UserError(f"--from_peft {folder}: {hint}")
