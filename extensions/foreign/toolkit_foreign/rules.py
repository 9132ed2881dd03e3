"""Rules that convert keys of another tool's configuration file to options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from toolkit.config.dialects import ForeignFile
from toolkit.errors import did_you_mean

Options = dict[str, Any]
"""Values of toolkit's options by dotted name."""
Convert = Callable[["ForeignConfig", Any], Options | str]


class Rule(NamedTuple):
    """Conversion of one key of another tool.

    Args:
        read: Option values by key value, or a function that checks and converts a key's value. Its ValueError states
            what the value must be.
        options: The options that the key sets, separated by spaces. If flags set all of them, the key is ignored.
        convert: Returns the options, or why the key sets none; raises ValueError with the fix. Default: the options
            have the value.
        no_effect: Why the key sets no option, or a function that returns it, or "" if the key sets some.
        note: Text to add to the line that reports the key.
        fixes: Unsupported values, each with the fix.
    """

    read: Mapping[Any, Any] | Callable[[Any], Any]
    options: str
    convert: Convert | None = None
    no_effect: str | Callable[[ForeignConfig], str] = ""
    note: str = ""
    fixes: Mapping[str, str] = {}

    def apply(self, file: ForeignConfig, value: Any) -> Options | str:
        """Return the options that the key sets, or why it sets none.

        Raises:
            ValueError: the value is invalid or cannot be honored; the message is the fix.
        """
        value = self.read(value) if callable(self.read) else self._look_up(self.read, value)
        if reason := self.no_effect(file) if callable(self.no_effect) else self.no_effect:
            return reason
        return self.convert(file, value) if self.convert else dict.fromkeys(self.options.split(), value)

    def _look_up(self, choices: Mapping[Any, Any], value: Any) -> Any:
        if type(value) in (str, bool) and value in choices:
            return choices[value]
        if isinstance(value, str) and value in self.fixes:
            raise ValueError(self.fixes[value])
        names = [name for name in choices if isinstance(name, str)]
        raise ValueError(f"must be {' or '.join(names) or 'true or false'}{did_you_mean(str(value), names)}")


class ForeignConfig(ForeignFile):
    """A file with groups of another tool, as the rules ask it."""

    def find(self, group: str, key: str) -> Any:
        """Return the value of a key; None if it is missing."""
        return self.groups.get(group, {}).get(key)

    def option(self, name: str) -> str | None:
        """Return the text of a toolkit option; None if it is unset or auto."""
        value = self.overrides.get(name) or self.toolkit_options.get(name)
        return None if value is None or value.text == "auto" else value.text

    def override(self, option: str) -> str | None:
        """Return what overrides ``option``, for display. Another data class overrides all data options."""
        data = self.overrides.get("data") or self.toolkit_options.get("data")
        if option.startswith("data.") and data is not None and data.text.rpartition(".")[2] != "CharText":
            return data.display("data")
        return self.overrides[option].display(option) if option in self.overrides else None


# ---- values of keys


def number(must: str, is_valid: Callable[[float], bool], value: Any) -> int | float:
    """Return a number. YAML 1.1 reads 2e-4, which has no point, as a string."""
    try:
        result = float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if not is_valid(result):
        raise ValueError(f"must be {must}")
    return int(result) if result.is_integer() else result


COUNT = partial(number, "an integer greater than zero", lambda n: n > 0 and n.is_integer())
COUNT_OR_ZERO = partial(number, "an integer that is not negative", lambda n: n >= 0 and n.is_integer())
POSITIVE = partial(number, "a number greater than zero", lambda n: n > 0)
NOT_NEGATIVE = partial(number, "a number that is not negative", lambda n: n >= 0)
FRACTION = partial(number, "greater than 0 and at most 1", lambda n: 0 < n <= 1)
BOOL = {True: True, False: False}


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string")
    return value


# ---- keys of several formats


def _per_device(file: ForeignConfig, size: int) -> Options:
    accumulation = COUNT(file.find("training", "gradient_accumulation_steps") or 1)
    return {"train.micro_batch_size": size, "train.global_batch_size": size * file.world_size() * accumulation}


BATCH_SIZE = Rule(COUNT, "train.micro_batch_size train.global_batch_size", _per_device, note="it is per device")
CLIP_NORM = Rule(NOT_NEGATIVE, "train.max_norm")
