"""Mix several data modules by weight."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar

from toolkit.config.classes import class_path
from toolkit.config.command import CommandOptions
from toolkit.data.base import (
    Content,
    DataModule,
    PreparedData,
    Report,
    Values,
    is_ragged,
    mean_length,
    member,
    require,
    row_count,
    row_lengths,
)
from toolkit.data.cache import hash_inputs
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.rows import check_rows
from toolkit.errors import UserError
from toolkit.extension import is_built_in

MAX_SOURCES = 256


@dataclass(frozen=True)
class MixtureSource:
    """An entry of ``sources``, see :class:`Mixture`."""

    data: DataModule
    weight: float
    max_epochs: float | None


def _data_option(data: DataModule) -> None:
    """Declare a source's data options as a command, to parse them with :class:`CommandOptions`."""


def _source_options(weight: float, max_epochs: float | None = None) -> None:
    """Declare the other options of a source."""


@dataclass
class Mixture(DataModule):
    """Several sources mixed by token weight. A source may be any data class except Mixture.

    Args:
        sources: The sources by name, in YAML: {web: {weight: 0.75, data: {class_path: TextFiles, init_args: {...}}},
            ...}. The weights must sum to 1. A source with weight 0 is only used for validation. max_epochs: maximum
            epochs over the source; a run that needs more raises an error.
        change_weights: Allow resuming with changed weights. The new weights apply from the resumed step on, and each
            source continues where it stopped. If false, changed weights raise an error.
        num_workers: Data loading processes; 0 reads in the training process.
    """

    sources: dict[str, dict]
    change_weights: bool = False
    num_workers: int = 0

    content: ClassVar[Content] = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise UserError(f"--data.sources {self.sources}: must map at least one name to a weight and data")
        require(len(self.sources) <= MAX_SOURCES, "sources", len(self.sources), f"must be at most {MAX_SOURCES}")
        self._modules = {name: _read_source(name, entry) for name, entry in self.sources.items()}
        self.sources = {name: _to_dict(source) for name, source in self._modules.items()}
        self.checks_tokens = any(module.checks_tokens for module in self.sources_by_name.values())
        weights = {name: source.weight for name, source in self._modules.items()}
        if abs((total := sum(weights.values())) - 1) > 1e-6:
            shares = {name: weight / total if total else 1 / len(weights) for name, weight in weights.items()}
            as_shares = ", ".join(f"{name} {share:.6g}" for name, share in shares.items())
            raise UserError(f"--data.sources: the weights sum to {total:g}; they must sum to 1, such as {as_shares}")

    @property
    def sources_by_name(self) -> dict[str, DataModule]:
        return {name: source.data for name, source in self._modules.items()}

    @property
    def packing(self) -> str:
        """Packing of the first source with packed rows, else "none". Used by ``toolkit plan``."""
        packings = (getattr(module, "packing", "none") for module in self.sources_by_name.values())
        return next((packing for packing in packings if packing != "none"), "none")

    @property
    def vocab_size(self) -> Any:
        """Vocabulary size option of the first source; 0 if it has none."""
        return getattr(next(iter(self.sources_by_name.values())), "vocab_size", 0)

    def prepare(self, *, tokenizer: Tokenizer | None, max_seq_length: int, report: Report = print) -> PreparedData:
        """See :meth:`DataModule.prepare`.

        If ``tokenizer`` is None, the first source that trains a tokenizer trains it for all sources; pre-tokenized
        sources then raise an error.
        """
        from toolkit.data.interleave import MixtureRows, SourceRows

        parts: dict[str, PreparedData] = {}
        trained = ""  # name of the source that trained the tokenizer
        for name, source in self._modules.items():
            parts[name] = _prepare_source(name, source, tokenizer, max_seq_length, report)
            source_tokenizer = parts[name].tokenizer
            if source_tokenizer is None:
                continue
            if tokenizer is None:
                tokenizer, trained = source_tokenizer, name * (parts[name].vocab_size is None)
                report(f"Data: all sources use the tokenizer of {name}")
            elif source_tokenizer.fingerprint != tokenizer.fingerprint:
                raise UserError(
                    f"--data.sources.{name}: its tokenizer differs from {tokenizer.name}; remove the source, or "
                    "prepare its data with that tokenizer"
                )
        if trained and (names := [name for name, part in parts.items() if part.vocab_size is not None]):
            raise UserError(
                f"--data.sources.{names[0]}: was tokenized with a different tokenizer than the one trained on "
                f"{trained}; pass one --tokenizer_dir for all sources"
            )
        # A source may have resolved an option, such as a branch to its commit.
        self.sources = {name: _to_dict(source) for name, source in self._modules.items()}
        rows = [
            SourceRows(name, parts[name].train, source.weight, source.max_epochs, mean_length(parts[name].train))
            for name, source in self._modules.items()
        ]
        train = MixtureRows(rows, self.change_weights)
        return _join(parts, train, tokenizer, report)


def _read_source(name: Any, entry: Any) -> MixtureSource:
    flag = f"--data.sources.{name}"
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise UserError(f"--data.sources {name!r}: a name must consist of letters, digits, _ and -")
    if not isinstance(entry, Mapping):
        raise UserError(f"{flag} {entry}: must be a mapping such as {{weight: 0.5, data: {{class_path: TextFiles}}}}")
    try:
        options = _parse(_source_options, {key: value for key, value in entry.items() if key != "data"})
    except UserError as error:
        raise UserError(re.sub(r"--(?!help)", f"{flag}.", str(error))) from error
    weight, max_epochs = options["weight"], options["max_epochs"]
    if not 0 <= weight < math.inf:
        raise UserError(f"{flag}.weight {entry['weight']}: must be a number from 0 to 1")
    if max_epochs is not None and not 0 < max_epochs < math.inf:
        raise UserError(f"{flag}.max_epochs {entry['max_epochs']}: must be a number greater than zero, or null")
    module = entry.get("data")
    if not isinstance(module, DataModule):
        module = _make_module(flag, module)
    if isinstance(module, Mixture):
        raise UserError(
            f"{flag}.data Mixture: list its sources in --data.sources, each with the product of both weights"
        )
    if not is_dataclass(module):
        raise UserError(f"{flag}.data {type(module).__name__}: must be an instance of a dataclass")
    if module.num_workers:
        raise UserError(f"{flag}.data.num_workers {module.num_workers}: has no effect; use --data.num_workers")
    return MixtureSource(module, weight, max_epochs)


def _parse(function: Callable[..., None], values: Mapping[str, Any]) -> Values:
    """Return the arguments for ``function`` from options of a YAML file."""
    command = CommandOptions(function)
    command.update(command.flatten(values, ""))
    return command.arguments(command.resolve())


def _make_module(flag: str, value: Any) -> DataModule:
    """Build a source's data module from a class name, or a mapping with class_path and init_args."""
    if isinstance(value, Mapping):
        value = {"class_path": None, **value}  # an error if it is not given
    try:
        return _parse(_data_option, {"data": value})["data"]
    except UserError as error:
        raise _with_flag(error, flag) from error


def _with_flag(error: UserError, flag: str) -> UserError:
    """Return the error with ``--data`` replaced by ``<flag>.data``, the source's option in the mixture."""
    return UserError(re.sub(r"--data(?=[. :])", f"{flag}.data", str(error)))


def _to_dict(source: MixtureSource) -> Values:
    """Return the ``sources`` entry that recreates ``source``."""
    module: Any = source.data
    data = {"class_path": class_path(type(module), DataModule), "init_args": json.loads(json.dumps(asdict(module)))}
    return {"weight": source.weight, "max_epochs": source.max_epochs, "data": data}


def _prepare_source(
    name: str, source: MixtureSource, tokenizer: Tokenizer | None, max_seq_length: int, report: Report
) -> PreparedData:
    module, flag = source.data, f"--data.sources.{name}"

    def report_source(line: str) -> None:
        report(line.replace("Data: ", f"Data: {name}: ", 1))

    try:
        prepared = module.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=report_source)
    except UserError as error:
        raise _with_flag(error, flag) from error
    kind = type(module).__name__
    if not is_built_in(type(module)):
        check_rows(f"{flag}.data {kind}", prepared, max_seq_length)
    rows = prepared.train
    if row_count(rows) == 0:
        raise UserError(f"{flag}.data {kind}: has no training rows")
    if source.max_epochs is not None and row_count(rows) is None:
        raise UserError(f"{flag}.max_epochs {source.max_epochs:g}: the number of rows of {kind} is unknown; remove it")
    if is_ragged(rows) and (row_lengths(rows) is None or member(rows, "order") is not None):
        raise UserError(f"{flag}.data {kind}: the lengths of its rows are unknown; weights are shares of tokens")
    return prepared


def _join(parts: dict[str, PreparedData], train: Any, tokenizer: Tokenizer | None, report: Report) -> PreparedData:
    """Join the prepared sources. ``train`` is a :class:`~toolkit.data.interleave.MixtureRows` over them."""
    from toolkit.data.interleave import ConcatenatedRows, describe_weights

    val = {name: rows for name, part in parts.items() if (rows := part.val) is not None and len(rows)}
    # exclude the weights: they may change on resume
    key = hash_inputs([[name, part.content_key] for name, part in parts.items()])
    sizes = [part.vocab_size for part in parts.values() if part.vocab_size is not None]
    weights = describe_weights({source.name: source.weight for source in train.sources})
    held_out = ConcatenatedRows(list(val.values())) if val else None
    summary = f"a mixture of {weights}; {row_count(held_out):,} held-out rows"
    report(f"Data: {summary}")
    return PreparedData(
        train=train,
        val=held_out,
        tokenizer=tokenizer,
        content_key=key,
        summary=summary,
        vocab_size=max(sizes) if sizes and (tokenizer is None or len(sizes) == len(parts)) else None,
        val_sources=val,
        added_bos=next((part.added_bos for part in parts.values() if part.added_bos), None),
    )
