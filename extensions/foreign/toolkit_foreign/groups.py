"""Recognize files of other tools by their groups."""

from collections.abc import Mapping
from typing import Any

from toolkit.config.dialects import Dialect, ForeignFile

GROUPS = (
    "model", "data", "training", "distributed", "data_config", "gpt_config", "optimizer_config", "trainer_config",
)  # fmt: skip


def find_groups(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other tools' groups in a file. A ``hydra`` group needs one of minGPT's groups."""
    groups = {name: inner for name, inner in values.items() if name in GROUPS}
    if not (isinstance(data := groups.get("data"), Mapping) and "dataset_name" in data):
        groups.pop("data", None)  # toolkit's own
    if any(name.endswith("_config") for name in groups) and "hydra" in values:
        groups["hydra"] = values["hydra"]
    return groups


def translate(file: ForeignFile) -> dict[str, tuple[Any, str]]:
    from toolkit_foreign import formats  # the rules: most files have toolkit's own groups only

    return formats.translate(file)


DIALECT = Dialect(groups=find_groups, translate=translate)
