"""Log-probabilities of a reference model, computed once before training and cached by content."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.checkpoints.folder import require_language_model
from toolkit.data.base import PreparedData, Report, TokenDataset, rows_of
from toolkit.data.cache import (
    choose_cache_dir,
    find_prepared,
    hash_inputs,
    load_or_prepare,
    read_manifest,
    write_manifest,
)
from toolkit.data.loader import val_batches
from toolkit.distributed import ranks
from toolkit.distributed.cpu_memory import malloc_trim
from toolkit.distributed.private_lightning import FabricModule
from toolkit.planning.frozen import require_same_vocabulary
from toolkit.planning.resolve import read_reference_config
from toolkit.training.build import build_frozen
from toolkit.training.checkpoint_meta import model_fingerprint
from toolkit.training.launch import Launch
from toolkit.training.model_spec import specify_frozen
from toolkit_align.log_probs import REFERENCE, label_log_probs

_FILE = "log_probs.npz"
_CODE_VERSION = 3  # increment if the same model and rows give other values


class _WithReference:
    """Rows with the value "reference": the log-probability of the supervised tokens, in nats.

    Args:
        log_probs: (groups, rows of a group), fp64.
    """

    def __init__(self, rows: TokenDataset, log_probs: np.ndarray) -> None:
        self._rows, self._log_probs = rows, log_probs

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        rows = rows_of(self._rows[index])
        pairs = zip(rows, self._log_probs[index].tolist(), strict=True)
        rows = [row | {"values": row.get("values", {}) | {REFERENCE: value}} for row, value in pairs]
        return rows if len(rows) > 1 else rows[0]

    def __getattr__(self, name: str) -> Any:  # lengths, group_size and others
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._rows, name)


def with_reference(launch: Launch) -> PreparedData:
    """Return the data of a run with the log-probabilities of its reference, if it needs them. Collective."""
    data, args, report = launch.data, launch.args, launch.display.message
    folder = args.reference_dir
    if folder is None:
        return data
    parts = {name: rows for name, rows in (("train", data.train), ("val", data.val)) if rows is not None and len(rows)}
    config = read_reference_config(args, folder, launch.spec.config)
    inputs = {"code": _CODE_VERSION, "data": data.content_key, "precision": launch.config.precision}
    inputs |= {} if config.qat is None else {"qat": config.qat}
    key = hash_inputs(inputs | {"model": model_fingerprint(folder)})
    cached = choose_cache_dir(getattr(args.data, "cache_dir", None)) / f"reference-{key[:16]}"
    read = partial(_read, cached, key, parts)
    values = ranks.result_of_rank0(lambda: find_prepared(cached, read)[0])
    if values is None:
        launch.display.phase("computing reference log-probabilities")
        report(f"Reference: computing the log-probabilities of {folder} once")
        flag = f"--objective.reference_dir {folder}"
        require_language_model(config, flag)
        require_same_vocabulary(flag, config, launch.spec.config)
        model = build_frozen(launch, specify_frozen(config), folder, is_exact=True)
        computed = {name: _compute(launch, model, rows, report) for name, rows in parts.items()}
        del model
        malloc_trim()
        if launch.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        make = partial(_write, key, computed)
        values = ranks.result_of_rank0(lambda: load_or_prepare(cached, f"of {folder}", read, make, report)[0])
    report(f"Reference: log-probabilities of {folder} in {cached}")
    wrapped: dict[str, Any] = {name: _WithReference(rows, values[name]) for name, rows in parts.items()}
    return replace(data, **wrapped)


@torch.no_grad()
def _compute(launch: Launch, model: FabricModule, rows: TokenDataset, report: Report) -> np.ndarray:
    """Return the log-probabilities of all rows, (groups, rows of a group) fp64, the same on every rank."""
    group_size, layout = getattr(rows, "group_size", 1), ranks.layout()
    totals = torch.zeros(len(rows), group_size, dtype=torch.float64)
    batches = val_batches(
        rows,
        micro_batch_size=launch.config.batch.micro_batch_size,
        rank=layout.data_rank(ranks.global_rank()),
        world_size=layout.data_parallel,
        max_rows=None,
    )
    for batch in batches:
        log_probs, _ = label_log_probs(model, batch, launch.fabric.device)
        for i, (row, value) in enumerate(zip(batch.ids, log_probs.tolist(), strict=True)):
            if row >= 0 and ranks.is_first("tensor"):
                totals[row, i % group_size] = value
    return ranks.sum_over_ranks(totals).numpy()


def _write(key: str, values: dict[str, np.ndarray], folder: Path) -> None:
    np.savez(folder / _FILE, **values)  # type: ignore[arg-type]
    write_manifest(folder, {"key": key})


def _read(folder: Path, key: str, parts: dict[str, TokenDataset]) -> dict[str, np.ndarray]:
    read_manifest(folder, key)
    with np.load(folder / _FILE) as file:
        return {name: file[name].reshape(len(rows), getattr(rows, "group_size", 1)) for name, rows in parts.items()}
