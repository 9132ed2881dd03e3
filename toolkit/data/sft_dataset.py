"""Instruction data as rows of tokens on disk, once: rows of files -> records -> tokens with labels -> packed rows.

    <cache_dir>/<module>-<first 16 of the key>/tokens.bin, trained.bin   the samples, one after the other
                                              offsets.bin ...           where they begin, and which make up a row
                                              manifest.json             what is there, and the counts for people
                                              checksums.json            of all of these files

Which samples share a row is decided here, so the order of rows stays a pure function of their number (S2).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.base import PreparedData
from toolkit.data.cache import DAMAGE, MANIFEST, choose_cache_dir, clean_up, publish, unfinished, verify
from toolkit.data.order import shuffled_index
from toolkit.data.packing import best_fit
from toolkit.data.tokenize_sft import Counts, encode_samples
from toolkit.errors import UserError
from toolkit.models.labels import IGNORE_INDEX

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.data.tokenize_sft import Job

CODE_VERSION = 5  # raise it when the same rows and options would give other tokens, or other counts
_VAL_SEED = 0  # of the permutation whose first samples are held out
_INDEX = ("offsets", "sources", "numbers", "train_members", "train_starts", "val_members", "val_starts")
_CONTENT = ("tokens", "trained", "offsets", "train_members", "train_starts", "val_members", "val_starts")


def prepare_encoded(job: Job, report: Callable[[str], None]) -> PreparedData:
    """Find the rows of ``job`` in the cache or make them.

    Raises:
        UserError: if a row, the template or the cache folder is unusable, or nothing is left to train on.
    """
    start = time.perf_counter()
    key = _key(job)
    cache_dir = choose_cache_dir(job.cache_dir)
    folder = cache_dir / f"{job.module}-{key[:16]}"
    try:
        prepared, reason = _find(folder, key, job, report)
        if prepared is not None:
            report(f"Data: using cached {folder} ({time.perf_counter() - start:.1f} s)")
        else:
            report(f"Data: preparing {folder} ({reason}): encoding {', '.join(source.name for source in job.sources)}")
            clean_up(cache_dir)
            with unfinished(folder) as temporary:
                _make(temporary, key, job, report)
                publish(temporary, folder, lambda: _find(folder, key, job, report)[0] is not None)
            prepared = _open(folder, key, job)
    except OSError as error:
        raise UserError(f"--data.cache_dir {cache_dir}: cannot be used: {error.strerror or error}") from error
    for note in _notes(job, prepared.train.facts):
        report(f"Data: {note}")
    report(f"Data: {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _key(job: Job) -> str:
    facts = {
        "code": CODE_VERSION,
        "sources": {
            "train": [source.fingerprint() for source in job.splits.train],
            "val": job.splits.val and [source.fingerprint() for source in job.splits.val],
        },
        "tokenizer": job.tokenizer.fingerprint,
        "probe": job.tokenizer.encode("a"),  # whether bos is added to plain text
        "template": job.template and job.template.source,
        "options": job.facts(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _notes(job: Job, facts: dict[str, Any]) -> list[str]:
    notes, template = list(job.splits.notes), job.template
    if facts["conversations"] and template is not None:
        notes.append(f"chat template: {template.name}; end of turn: {template.end_of_turn}")
        notes += [f"{template.name}: {note}" for note in facts["notes"]]
    if repeats := facts["val_samples_also_trained"]:
        effect = "which makes the validation loss lower than it would be on new ones"
        notes.append(f"{repeats:,} of {facts['val_samples']:,} held-out samples are also trained on, {effect}")
    return notes


# ---- reading


@dataclass(frozen=True)
class Store:
    """The arrays of a prepared folder; the samples themselves are mapped where they are first used."""

    folder: Path
    dtype: np.dtype
    offsets: np.ndarray
    sources: np.ndarray
    numbers: np.ndarray
    source_names: tuple[str, ...]

    def where(self, sample: int) -> str:
        """The file and row that a sample comes from."""
        return self.place(int(self.sources[sample]), int(self.numbers[sample]))

    def place(self, source: int, number: int) -> str:
        return f"{self.source_names[source]} {number:,}"

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Input tokens and labels of a sample, each (N - 1,) int64."""
        begin, end = self.offsets[index], self.offsets[index + 1]
        tokens = self._map("tokens", self.dtype)[begin:end].astype(np.int64)
        trained = self._map("trained", np.dtype(np.bool_))[begin + 1 : end]
        return tokens[:-1], np.where(trained, tokens[1:], IGNORE_INDEX)

    def _map(self, name: str, dtype: np.dtype) -> np.ndarray:
        if name not in self.__dict__:
            # As a plain array: slices of np.memmap itself are slow.
            self.__dict__[name] = np.asarray(np.memmap(self.folder / f"{name}.bin", dtype, "r"))
        return self.__dict__[name]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # maps do not travel

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class PackedDataset:
    """The rows of one split; see :class:`toolkit.data.base.TokenDataset`.

    A packed row also has ``positions``, which begin at 0 in every document, and ``documents``, 0, 1, ... for its first,
    second, ... document, both (T,) int64. The last input of a document has the label that ends it: no document is
    predicted from the one before.

    Attributes:
        lengths: (n,) int64, the input tokens of each row.
        facts: What the preparation counted, over both splits (see :class:`toolkit.data.tokenize_sft.Counts`).
    """

    def __init__(
        self, store: Store, members: np.ndarray, starts: np.ndarray, packed: bool, facts: dict[str, Any]
    ) -> None:
        self._store, self._members, self._starts, self.packed, self.facts = store, members, starts, packed, facts
        inputs = np.diff(store.offsets)[members] - 1
        self.lengths: np.ndarray = np.add.reduceat(inputs, starts[:-1]) if len(members) else inputs

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        import torch

        samples = [self._store.sample(member) for member in self._row(index)]
        row = {
            "input_ids": np.concatenate([inputs for inputs, _ in samples]),
            "labels": np.concatenate([labels for _, labels in samples]),
        }
        if self.packed:
            sizes = [len(inputs) for inputs, _ in samples]
            row["positions"] = np.concatenate([np.arange(size) for size in sizes])
            row["documents"] = np.repeat(np.arange(len(sizes)), sizes)
        return {name: torch.from_numpy(values) for name, values in row.items()}

    def where(self, index: int) -> list[str]:
        """The files and rows that row ``index`` is made of."""
        return [self._store.where(member) for member in self._row(index)]

    def place(self, source: int, number: int) -> str:
        """``data/faq.jsonl line 17``, for a row of a source."""
        return self._store.place(source, number)

    def _row(self, index: int) -> list[int]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._members[self._starts[index] : self._starts[index + 1]].tolist()


def _find(folder: Path, key: str, job: Job, report: Callable[[str], None]) -> tuple[PreparedData | None, str]:
    """What lies ready in the cache, or the reason why nothing does."""
    if not folder.exists():
        return None, "not prepared yet"
    try:
        verify(folder, report)
        return _open(folder, key, job), ""
    except DAMAGE as error:
        return None, f"what is there is damaged ({error!s})"


def _open(folder: Path, key: str, job: Job) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE if it is not whole."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(manifest, dict) or manifest.get("key") != key:
        raise ValueError(f"{MANIFEST} belongs to other data")
    facts, arrays = manifest["facts"], manifest["arrays"]
    index = {name: np.fromfile(folder / f"{name}.bin", np.int64) for name in _INDEX}
    names = tuple(f"{source.name} {source.unit}" for source in job.sources)
    origins = (index["offsets"], index["sources"], index["numbers"], names)
    store = Store(folder, np.dtype(arrays["tokens"]["dtype"]), *origins)
    splits = {}
    for split in ("train", "val"):
        chosen = index[f"{split}_members"], index[f"{split}_starts"]
        rows = PackedDataset(store, *chosen, packed=job.packing != "none", facts=facts)
        splits[split] = rows if len(rows) else None
    if splits["train"] is None:
        raise ValueError("there are no training rows")
    tokenizer = job.tokenizer if job.template is None else job.template.export_tokenizer()
    return PreparedData(splits["train"], splits["val"], tokenizer, manifest["content_key"], summary(facts, job))


def _content_key(folder: Path, arrays: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name in _CONTENT:
        digest.update(f"|{name} {arrays[name]['dtype']} {arrays[name]['bytes']}|".encode())
        with open(folder / f"{name}.bin", "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


# ---- writing


def _make(folder: Path, key: str, job: Job, report: Callable[[str], None]) -> None:
    dtype = np.dtype(np.uint16 if job.tokenizer.vocab_size <= 1 << 16 else np.int32)
    counts, samples = encode_samples(job, folder / "tokens.bin", folder / "trained.bin", dtype, report)
    rows = _choose_rows(job, samples, counts)
    notes = [] if job.template is None else job.template.notes  # some are found only while it is used
    facts = counts.facts() | {"notes": [note.removeprefix(f"{job.template.name}: ") for note in notes]}
    facts |= {f"{split}_rows": len(starts) - 1 for split, (_, starts) in rows.items()}
    lengths = np.diff(samples["offsets"]) - 1
    used = {split: int(lengths[members].sum()) for split, (members, _) in rows.items()}
    facts |= {"tokens": sum(used.values()), "max_seq_length": job.max_seq_length, "packing": job.packing}
    facts["packing_efficiency"] = used["train"] / (facts["train_rows"] * job.max_seq_length)
    facts["val_samples"] = len(rows["val"][0])
    facts["val_samples_also_trained"] = _count_repeats(folder, dtype, samples, rows)
    index = {name: samples[name] for name in ("offsets", "sources", "numbers")}
    for split, (members, starts) in rows.items():
        index |= {f"{split}_members": members, f"{split}_starts": starts}
    for name, values in index.items():
        values.astype(np.int64).tofile(folder / f"{name}.bin")
    types = dict.fromkeys(_INDEX, "int64") | {"tokens": dtype.name, "trained": "bool"}
    arrays = {name: {"dtype": kind, "bytes": (folder / f"{name}.bin").stat().st_size} for name, kind in types.items()}
    manifest = {"key": key, "content_key": _content_key(folder, arrays), "facts": facts, "arrays": arrays}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _choose_rows(job: Job, samples: dict[str, np.ndarray], counts: Counts) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Per split: the samples of its rows one after the other (members), and where each row begins in them (starts)."""
    n_train = len(job.splits.train)
    own_val = samples["sources"] >= n_train
    train, val = np.flatnonzero(~own_val), np.flatnonzero(own_val)
    if job.splits.val is None:
        train, val = _hold_out(train, samples, job.val_fraction)
    for rows, what in ((train, "train on"), (val, "validate with")):
        if not len(rows) and (rows is train or job.splits.val is not None):
            raise UserError(f"{job.option}: no sample is left to {what}: {_fate(counts.facts())}{_mend(counts)}")
    lengths = np.diff(samples["offsets"]) - 1
    return {"train": _into_rows(job, train, lengths), "val": _into_rows(job, val, lengths)}


def _count_repeats(folder: Path, dtype: np.dtype, samples: dict[str, np.ndarray], rows: dict[str, Any]) -> int:
    """The number of held-out samples that are also trained on, token for token."""
    offsets, tokens = samples["offsets"].tolist(), np.asarray(np.memmap(folder / "tokens.bin", dtype, "r"))

    def marks(split: str) -> Iterator[int]:
        return (hash(tokens[offsets[i] : offsets[i + 1]].tobytes()) for i in rows[split][0].tolist())

    held_out = list(marks("val"))
    repeated = set(held_out).intersection(marks("train"))
    return sum(mark in repeated for mark in held_out)


def _hold_out(kept: np.ndarray, samples: dict[str, np.ndarray], fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Divide samples at random, always in the same way; the pieces of one stay together."""
    origin = np.stack([samples["sources"][kept], samples["numbers"][kept]])
    sample = np.cumsum(np.any(np.diff(origin, axis=1, prepend=origin[:, :1]), axis=0))
    n = int(sample[-1]) + 1 if len(sample) else 0
    n_val = min(max(1, round(n * fraction)), n - 1) if fraction and n else 0
    chosen = shuffled_index(np.arange(n_val), n, _VAL_SEED) if n_val else np.empty(0, np.int64)
    held_out = np.isin(sample, chosen)
    return kept[~held_out], kept[held_out]


def _into_rows(job: Job, samples: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if job.packing == "none":
        return samples, np.arange(len(samples) + 1)
    rows = best_fit(lengths[samples], job.max_seq_length)
    sizes = [len(row) for row in rows]
    return samples[[member for row in rows for member in row]] if rows else samples, np.cumsum([0, *sizes])


# ---- words for people


def summary(facts: dict[str, Any], job: Job) -> str:
    """What is there and what became of the samples, in one line."""
    size = f"{facts['tokens']:,} tokens, trained: {facts['trained_tokens'] / max(facts['tokens'], 1):.1%}"
    packed = f" packed into {job.max_seq_length:,} tokens ({facts['packing_efficiency']:.1%} full)"
    rows = f"{facts['train_rows']:,} train rows{packed if job.packing != 'none' else ''}"
    held_out = f"{facts['val_rows']:,} val rows" if facts["val_rows"] else "no val rows"
    return f"{_fate(facts)}; {size}; {rows}; {held_out}"


def _fate(facts: dict[str, Any]) -> str:
    parts = [f"{facts['samples']:,} samples", f"{facts['truncated']:,} truncated"]
    if facts["split"]:
        left_out = facts["pieces_left_out"]
        untrained = f" ({left_out:,} pieces without a trained token left out)" if left_out else ""
        parts.append(f"{facts['split']:,} split{untrained}")
    reasons = {"too_long": "too long", "untrained": "without a trained token", "empty": "with an empty answer"}
    why = ", ".join(f"{facts[name]:,} {reason}" for name, reason in reasons.items() if facts[name])
    return ", ".join([*parts, f"{facts['dropped']:,} dropped{f' ({why})' if why else ''}"])


def _mend(counts: Counts) -> str:
    return "; raise --train.max_seq_length" if counts.too_long or counts.untrained else ""
