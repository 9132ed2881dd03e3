"""Set values inside a mapping option, such as ``--data.sources.web.weight``."""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from toolkit.errors import UserError, did_you_mean
from toolkit.io.safe_parse import parse_yaml


def with_entry(mapping: Any, path: Sequence[str], value: Any, option_name: str) -> dict[str, Any]:
    """Return a copy of ``mapping`` (a dict or YAML text) with ``value`` set at ``path``.

    ``mapping`` must have the first key of the path. ``option_name`` is for messages.
    """
    with suppress(ValueError):
        mapping = parse_yaml(mapping) if isinstance(mapping, str) else copy.deepcopy(mapping)
    entries = mapping if isinstance(mapping, dict) else {}
    if path[0] not in entries:
        raise UserError(f"{option_name}: no entry {path[0]!r}{did_you_mean(path[0], map(str, entries))}")
    entry = entries
    for key in path[:-1]:
        if not isinstance(entry.setdefault(key, {}), dict):
            raise UserError(f"{option_name}: {key} is {entry[key]!r} and has no options")
        entry = entry[key]
    entry[path[-1]] = value
    return entries
