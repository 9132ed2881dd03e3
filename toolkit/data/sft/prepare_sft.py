"""Prepare instruction data, cached by content: rows -> records -> tokens and loss mask -> packed rows.

    <cache_dir>/<module>-<first 16 of the key>/tokens/, loss_mask/   token arrays, see tokens.token_store
                                              rows.npz        offsets and origins of samples and rows
                                              manifest.json   keys and statistics
                                              checksums.json  checksums of all files

Rows are packed before training, so that each row is a pure function of its index (S2).
"""

import bisect
import hashlib
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.base import LabelSet, PreparedData, Report, Row, TokenDataset, Values
from toolkit.data.cache import choose_cache_dir, hash_inputs, load_or_prepare, read_manifest, write_manifest
from toolkit.data.order import shuffled_index
from toolkit.data.sft.tokenize import Arrays, Counts, SFTConfig, tokenize_samples
from toolkit.data.tokens.token_store import TokenStore, TokenWriter, token_dtype
from toolkit.errors import UserError, join_first
from toolkit.models.labels import IGNORE_INDEX

CODE_VERSION = 9  # increment if the same rows and options produce different tokens or counts
# Sample indices of all rows of a split, concatenated, and the offset of each row in them.
Rows = tuple[np.ndarray, np.ndarray]
_VAL_SEED = 0  # seed of the permutation that selects held-out samples
_ROWS = "rows.npz"
# Options that affect prepared rows, for the cache key.
_OPTIONS = ("columns", "skip_empty", "train_on", "on_long", "packing", "max_seq_length", "val_fraction")
_CONTENT = ("offsets", "train_members", "train_starts", "val_members", "val_starts", "labels", "targets")


def prepare_sft(config: SFTConfig, report: Report) -> PreparedData:
    """Load prepared rows from the cache, or prepare them."""
    start = time.perf_counter()
    options = {name: getattr(config, name) for name in _OPTIONS}
    splits = {"train": config.splits.train, "val": config.splits.val}
    inputs = {
        "code": CODE_VERSION,
        "sources": {
            name: None if rows is None else [source.fingerprint() for source in rows] for name, rows in splits.items()
        },
        "tokenizer": config.tokenizer.fingerprint,
        "probe": config.tokenizer.encode("a"),  # shows whether the tokenizer adds bos
        "template": config.template and [config.template.source, *config.template.stop_ids],
        "options": options | ({} if config.kind == "answers" else {"kind": config.kind}),
    } | ({} if config.labeling is None else {"labeling": asdict(config.labeling)})
    key = hash_inputs(inputs)
    folder = choose_cache_dir(config.cache_dir) / f"{config.module}-{key[:16]}"
    prepared, is_cached = load_or_prepare(
        folder,
        f"tokenizing {', '.join(source.name for source in config.sources)}",
        lambda: _open(folder, key, config),
        lambda temporary: _make(temporary, key, config, report),
        report,
    )
    if is_cached:
        report(f"Data: using cached {folder} ({time.perf_counter() - start:.1f} s)")
    for note in _collect_notes(config, prepared.train.statistics):  # type: ignore[arg-type]
        report(f"Data: {note}")
    report(f"Data: {prepared.summary} ({time.perf_counter() - start:.1f} s)")
    return prepared


def _collect_notes(config: SFTConfig, statistics: Values) -> list[str]:
    notes, template = list(config.splits.notes), config.template
    if (labels := statistics.get("labels")) is not None:
        notes.append(labels[-1])
    if statistics["conversations"] and template is not None:
        notes.append(f"chat template: {template.name}; end of turn: {template.end_of_turn}")
        notes += [f"{template.name}: {note}" for note in statistics["notes"]]
    if unread := statistics["unread"]:
        notes.append(f"not read in training: {join_first(unread, 20)}")  # metrics may read them
    if statistics["one_label"]:
        notes.append("all completions have the same label; KTO needs good and bad ones")
    if unanswered := statistics["unanswered"]:
        notes.append(f"{unanswered:,} conversations end with a message of the user, which has no answer to train on")
    if cut := statistics["cut_prompts"]:
        completions = f"{statistics['cut_completions']:,} completions at the end"
        notes.append(f"cut {cut:,} prompts from the left, then {completions}; see --train.max_seq_length")
    if repeats := statistics["val_samples_also_trained"]:
        counts = f"{repeats:,} of {statistics['val_samples']:,}"
        notes.append(f"{counts} held-out samples are also trained on: the validation loss is biased low")
    return notes


# ---- reading


class PackedDataset(TokenDataset):
    """A split's rows; see :class:`toolkit.data.base.TokenDataset`.

    Packed rows also have ``positions`` and ``documents``, (T,) int64. No token is predicted from a previous document.

    Args:
        arrays: int64 arrays. "offsets" (n_samples + 1,): token offset of each sample. "sources" (n_samples,): index in
            ``source_names``. "numbers" (n_samples,): row number in the source. "<split>_members": sample indices of
            all rows, concatenated. "<split>_starts" (n_rows + 1,): offset of each row in the members.
        source_names: File and unit, such as ``data/faq.jsonl line``.
        statistics: Preparation statistics over both splits (see :class:`toolkit.data.sft.tokenize.Counts`).

    Pairs of completions are groups of two rows: the chosen one, then the rejected one. Rated completions have the value
    ``label``, 1 or 0.

    Attributes:
        lengths: Input tokens per row, or per group, (n,) int64.
        packed: Whether rows may contain several samples.
    """

    statistics: Values

    def __init__(
        self,
        store: TokenStore,
        arrays: Arrays,
        split: str,
        source_names: tuple[str, ...],
        statistics: Values,
    ) -> None:
        self._store, self._source_names, self.statistics = store, source_names, statistics
        self._offsets, self._sources, self._numbers = (arrays[name] for name in ("offsets", "sources", "numbers"))
        self._members, self._starts = arrays[f"{split}_members"], arrays[f"{split}_starts"]
        self._labels, self._targets = arrays.get("labels"), arrays.get("targets")
        self.packed = statistics["packing"] != "none"
        self._is_paired = "group_size" in statistics
        if self._is_paired:
            self.group_size = statistics["group_size"]
        inputs = np.diff(self._offsets)[self._members] - 1
        self.lengths: np.ndarray = np.add.reduceat(inputs, self._starts[:-1]) if len(inputs) else inputs

    @property
    def origins(self) -> set[tuple[int, int]]:
        """The index of the source and the row number of each sample."""
        return set(zip(self._sources[self._members].tolist(), self._numbers[self._members].tolist(), strict=True))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Any:
        members = self._row(index)
        return [self._read([member]) for member in members] if self._is_paired else self._read(members)

    def _read(self, members: list[int]) -> Row:
        import torch

        inputs, labels = zip(*map(self._sample, members), strict=True)
        row = {"input_ids": np.concatenate(inputs), "labels": np.concatenate(labels)}
        if self.packed:
            sizes = list(map(len, inputs))
            row["positions"] = np.concatenate(list(map(np.arange, sizes)))
            row["documents"] = np.repeat(np.arange(len(sizes)), sizes)
        tensors: Row = {name: torch.from_numpy(values) for name, values in row.items()}
        if self._targets is not None:
            tensors["targets"] = torch.from_numpy(self._targets[members])
        return tensors if self._labels is None else tensors | {"values": {"label": int(self._labels[members[0]])}}

    def where(self, index: int) -> list[str]:
        """Return the file and row number of each sample in row ``index``."""
        places = [(m, self.describe_row(self._sources[m], self._numbers[m])) for m in self._row(index)]
        if self._labels is None:
            return [place for _, place in places]
        return [f"{place} ({'chosen' if self._labels[member] else 'rejected'})" for member, place in places]

    def describe_row(self, source: int, number: int) -> str:
        """Return a row's location, such as ``data/faq.jsonl line 17``."""
        return f"{self._source_names[source]} {number:,}"

    def _sample(self, member: int) -> Rows:
        begin, end = self._offsets[member : member + 2].tolist()
        tokens = self._store.tokens(begin, end).astype(np.int64)
        return tokens[:-1], np.where(self._store.loss_mask(begin + 1, end), tokens[1:], IGNORE_INDEX)

    def _row(self, index: int) -> list[int]:
        self.require_row(index)
        return self._members[self._starts[index] : self._starts[index + 1]].tolist()


class RatedDataset(PackedDataset):
    """Rated completions: rows with the value ``label``, 1 for a good one, 0 for a bad one."""

    group_size = 2

    def with_partner(self, index: int, partner: int) -> list[Row]:
        """Return the row, and its prompt with the completion of row ``partner``."""
        import torch

        row, other = self[index], self[partner]
        prompt, skipped = (int((r["labels"] != IGNORE_INDEX).nonzero()[0]) for r in (row, other))
        inputs = torch.cat([row["input_ids"][: prompt + 1], other["input_ids"][skipped + 1 :]])
        labels = torch.cat([row["labels"][:prompt], other["labels"][skipped:]])
        limit = self.statistics["max_seq_length"]
        return [row, {"input_ids": inputs[:limit], "labels": labels[:limit]}]


def _open(folder: Path, key: str, config: SFTConfig) -> PreparedData:
    """Read a prepared folder. Raises one of DAMAGE_ERRORS if damaged."""
    manifest = read_manifest(folder, key)
    statistics, store = manifest["facts"], TokenStore(folder)
    with np.load(folder / _ROWS) as file:
        arrays = dict(file)
    names = tuple(f"{source.name} {source.unit}" for source in config.sources)
    cls = RatedDataset if config.kind == "rated" else PackedDataset
    train, val = (cls(store, arrays, split, names, statistics) for split in ("train", "val"))
    if not len(train):
        raise ValueError("there are no training rows")
    tokenizer = config.tokenizer if config.template is None else config.template.export_tokenizer()
    summary = summarize(statistics, config)
    labels = statistics.get("labels")
    labels = None if labels is None else LabelSet(*labels[:2])
    return PreparedData(train, val if len(val) else None, tokenizer, manifest["content_key"], summary, labels=labels)


def _content_key(store: TokenStore, arrays: Arrays) -> str:
    assert store.mask is not None
    digest = hashlib.sha256()
    for name, array, dtype in (("tokens", store.array, store.dtype.name), ("trained", store.mask, "bool")):
        digest.update(f"|{name} {dtype} {len(array) * array.dtype.itemsize}|".encode())
        for block in array.blocks():
            digest.update(block.data)
    for name in filter(arrays.__contains__, _CONTENT):
        digest.update(f"|{name} int64 {arrays[name].nbytes}|".encode() + arrays[name].tobytes())
    return digest.hexdigest()


# ---- writing


def _make(folder: Path, key: str, config: SFTConfig, report: Report) -> None:
    writer = TokenWriter(folder, token_dtype(config.tokenizer.vocab_size), with_loss_mask=True)
    counts, samples, records = tokenize_samples(config, writer, report)
    rows = _assign_rows(config, samples, counts)
    if config.labeling is not None:
        names = config.splits.train[0].class_names().get(config.labeling.label_column)
        is_known, is_trained = samples["sources"] < len(config.splits.train), np.full(len(records), False)
        is_trained[rows["train"][0]] = True
        samples["targets"], counts.labels = config.labeling.encode(records, is_known, is_trained, names)
    arrays = dict(samples)
    for split, (members, starts) in rows.items():
        arrays |= {f"{split}_members": members.astype(np.int64), f"{split}_starts": starts.astype(np.int64)}
    np.savez(folder / _ROWS, **arrays)  # type: ignore[arg-type]
    lengths = np.diff(samples["offsets"]) - 1
    used = {split: int(lengths[members].sum()) for split, (members, _) in rows.items()}
    n_rows = {f"{split}_rows": len(starts) - 1 for split, (_, starts) in rows.items()}
    store, template = TokenStore(folder), config.template
    statistics = {
        **counts.to_dict(),
        # rendering adds notes
        "notes": [] if template is None else [note.removeprefix(f"{template.name}: ") for note in template.notes],
        **n_rows,
        "tokens": sum(used.values()),
        "max_seq_length": config.max_seq_length,
        "packing": config.packing,
        **({"group_size": 2} if config.is_paired else {}),
        "one_label": len(set(samples.get("labels", []))) == 1,
        "packing_efficiency": used["train"] / (n_rows["train_rows"] * config.max_seq_length),
        "val_samples": len(rows["val"][0]),
        "val_samples_also_trained": _count_repeats(store, samples["offsets"], rows),
    }
    write_manifest(folder, {"key": key, "content_key": _content_key(store, arrays), "facts": statistics})


def _assign_rows(config: SFTConfig, samples: Arrays, counts: Counts) -> dict[str, Rows]:
    """Return (members, starts) per split: the concatenated sample indices of all rows, and the row offsets."""
    n_train = len(config.splits.train)
    is_val = samples["sources"] >= n_train
    train, val = np.flatnonzero(~is_val), np.flatnonzero(is_val)
    if config.splits.val is None:
        train, val = _hold_out(train, samples, config.val_fraction)
    for rows, purpose in ((train, "train on"), (val, "validate with")):
        if not len(rows) and (rows is train or config.splits.val is not None):
            is_cut = [*counts.longest, (0,)][0][0] > config.max_seq_length + 1
            hint = "; increase --train.max_seq_length" if is_cut else ""
            if config.template:
                hint += "; ".join(["", *config.template.notes])
            raise UserError(
                f"{config.option}: no sample is left to {purpose}: {_describe_counts(counts.to_dict())}{hint}"
            )
    lengths = np.diff(samples["offsets"]) - 1
    return {"train": _group_rows(config, train, lengths), "val": _group_rows(config, val, lengths)}


def _count_repeats(store: TokenStore, offsets: np.ndarray, rows: Values) -> int:
    """Count held-out samples whose tokens equal those in a training sample."""

    def hash_samples(split: str) -> Iterator[int]:
        return (hash(store.tokens(*offsets[i : i + 2].tolist()).tobytes()) for i in rows[split][0].tolist())

    held_out = list(hash_samples("val"))
    repeated = set(held_out).intersection(hash_samples("train")) if held_out else set()
    return sum(value in repeated for value in held_out)


def _hold_out(indices: np.ndarray, samples: Arrays, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Split samples into train and val at random with a fixed seed. All pieces of a sample go to one split."""
    origins = samples["sources"][indices] << 40 | samples["numbers"][indices]
    unique, sample = np.unique(origins, return_inverse=True)  # numbers the samples, in order
    held_out = np.isin(sample, held_out_samples(len(unique), fraction))
    return indices[~held_out], indices[held_out]


def held_out_samples(n: int, fraction: float) -> np.ndarray:
    """Return which of ``n`` samples are held out, int64. At least one is, and one is left to train on."""
    n_val = min(max(1, round(n * fraction)), n - 1) if fraction and n else 0
    return shuffled_index(np.arange(n_val), n, _VAL_SEED) if n_val else np.empty(0, np.int64)


def _group_rows(config: SFTConfig, samples: np.ndarray, lengths: np.ndarray) -> Rows:
    if config.packing == "none":
        return samples, np.arange(0, len(samples) + 1, 2 if config.is_paired else 1)
    rows = best_fit(lengths[samples], config.max_seq_length)
    sizes = [len(row) for row in rows]
    return samples[[member for row in rows for member in row]] if rows else samples, np.cumsum([0, *sizes])


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Pack samples with best-fit decreasing: longest first, each into the fullest row with enough space.

    Uses at most 11/9 of the optimal number of rows, plus a constant (Johnson, "Near-optimal bin packing algorithms",
    1973). Deterministic; ties keep the input order.

    Args:
        lengths: Input tokens per sample, (n,), 1 to ``capacity``.
        capacity: Input tokens per row.

    Returns:
        Sample indices per row, in increasing order. Rows are sorted by first sample.
    """
    assert lengths.max(initial=0) <= capacity  # _fit_to_row cuts samples
    rows: list[list[int]] = []
    rows_by_free: dict[int, list[int]] = {}  # free tokens -> rows
    free_sizes: list[int] = []  # sorted keys of rows_by_free
    for sample in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[sample])
        i = bisect.bisect_left(free_sizes, length)
        if i == len(free_sizes):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free = free_sizes[i]
            row = rows_by_free[free].pop()
            if not rows_by_free[free]:
                del rows_by_free[free], free_sizes[i]
        rows[row].append(sample)
        if left := free - length:
            if left not in rows_by_free:
                bisect.insort(free_sizes, left)
                rows_by_free[left] = []
            rows_by_free[left].append(row)
    return sorted(sorted(row) for row in rows)


# ---- log lines


def summarize(statistics: Values, config: SFTConfig) -> str:
    size = (
        f"{statistics['tokens']:,} tokens, trained: {statistics['trained_tokens'] / max(statistics['tokens'], 1):.1%}"
    )
    packed = f" packed into {config.max_seq_length:,} tokens ({statistics['packing_efficiency']:.1%} full)"
    rows = f"{statistics['train_rows']:,} train rows{packed if config.packing != 'none' else ''}"
    held_out = f"{statistics['val_rows']:,} val rows" if statistics["val_rows"] else "no val rows"
    return f"{_describe_counts(statistics)}; {size}; {rows}; {held_out}"


def _describe_counts(statistics: Values) -> str:
    parts = [f"{statistics['samples']:,} samples", f"{statistics['truncated']:,} truncated"]
    if statistics["split"]:
        n_dropped = statistics["pieces_left_out"]
        untrained = f" ({n_dropped:,} pieces without a trained token dropped)" if n_dropped else ""
        parts.append(f"{statistics['split']:,} split{untrained}")
    reasons = {"too_long": "too long", "untrained": "without a trained token"}
    reasons |= {"empty": "with an empty answer", "equal": "with equal answers"}
    dropped = ", ".join(f"{statistics[name]:,} {reason}" for name, reason in reasons.items() if statistics[name])
    return ", ".join([*parts, f"{statistics['dropped']:,} dropped{f' ({dropped})' if dropped else ''}"])
