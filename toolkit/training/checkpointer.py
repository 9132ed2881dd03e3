"""S2 exact-resume: save and restore the weights and, in ``trainer/``, the state to continue from.

Saving and restoring are collective. Rank 0 gathers the state and writes the folder. With ``sharded`` every rank writes
its shards into the folder. If a rank cannot write, the save fails on all ranks.
"""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.checkpoints.adapters import write_adapter_files
from toolkit.checkpoints.finite import nonfinite_state
from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import adapter_state, full_state, sharded_state
from toolkit.checkpoints.store import WEIGHTS
from toolkit.checkpoints.weights import Tensors, load_state, save_state
from toolkit.data.base import State
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.distributed.names import canonical_name
from toolkit.errors import UserError
from toolkit.models.lora import is_adapter
from toolkit.planning.limits import Progress
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import data_modules
from toolkit.training.checkpoint_meta import CALLBACKS, FORMAT_VERSION, TRAINER
from toolkit.training.pending_save import PendingSave, Snapshot
from toolkit.training.start_state import StartState
from toolkit.ui.loggers import rows_crc

STATE, OPTIMIZER = "state.pth", "optimizer"


@dataclass
class Checkpointer:
    """Saves and restores the checkpoints of a run.

    Args:
        tokenizer: None if the data is pre-tokenized.
        module: The model as the strategy wraps it.
        optimizer: The optimizer before Fabric wraps it.
        scaler: The GradScaler of 16-mixed, otherwise None.
        device: The device of this rank.
        report_wait: Prints a message if a rank takes long to write.
    """

    config: ResolvedConfig
    state: StartState
    tokenizer: Tokenizer | None
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any | None
    device: torch.device
    report_wait: Callable[[str], None]

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its shards; otherwise rank 0 writes one file."""
        return self.config.args.fsdp.state_dict_type == "sharded"

    def begin(self, name: str, progress: Progress, callbacks: State, copies: HostCopies | None = None) -> PendingSave:
        """Start a save of ``out_dir/name``. With ``copies`` training can overlap with the write."""
        # A rank that fails in these collectives must exit at once, because the others wait in them.
        rng = ranks.all_gather_object(rng_state(self.device))
        state, module, optimizer = self.state, self.module, self.optimizer
        shards: dict[str, Tensors] = {}
        weights: Tensors = {}
        offload = copies is None  # HostCopies already copies to pinned memory
        if state.base is not None:
            weights, rest = adapter_state(module, optimizer)
        elif self.sharded:
            shards[WEIGHTS], shards[f"{TRAINER}/{OPTIMIZER}"], rest = sharded_state(
                module, optimizer, state.model.tied, offload
            )
        else:
            weights, rest = full_state(
                module, optimizer, state.model.tied, offload or self.config.strategy.kind == "fsdp"
            )
        scaler = None if self.scaler is None else self.scaler.state_dict()
        snapshot = Snapshot(deepcopy(progress), rng, weights, rest, scaler, deepcopy(callbacks))
        if copies is not None:
            copies.begin(module, optimizer)
        # Every rank searches its shard on its device. On a CPU this takes 5 % of the write time, on idle cores.
        pool = ThreadPoolExecutor(1)
        search = pool.submit(nonfinite_state, module, optimizer)
        pool.shutdown(wait=False)
        folder = self.config.args.run_dir / name
        return PendingSave(folder, snapshot, self._write, shards, self._shapes(), search, self.report_wait, copies)

    def _shapes(self) -> dict[str, torch.Size]:
        """Return the shapes to save, by name; empty for a user-provided module."""
        shapes = self.state.model.shapes
        if self.state.base is not None:
            return {name: shape for name, shape in shapes.items() if is_adapter(name)}
        return {name: shape for name, shape in shapes.items() if not (self.sharded and name in self.state.model.tied)}

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write everything except the shards."""
        state = self.state
        if state.base is not None:
            write_adapter_files(folder, snapshot.weights, state.base)
        write_model_files(
            folder,
            state_dict=None if self.sharded or state.base is not None else snapshot.weights,
            config=state.model.config,
            hyperparameters=self.config.hyperparameters() if self.config.args.is_repeatable else None,
            tokenizer=self.tokenizer,
        )
        (folder / TRAINER).mkdir(exist_ok=True)  # other ranks' shards may have created it
        data = self.config.args.data
        rows = snapshot.progress.logged_rows
        snapshot.progress.metrics_crc = rows_crc(self.config.args.run_dir / "logs" / "metrics.csv", rows)
        meta = {
            "format_version": FORMAT_VERSION,
            **asdict(snapshot.progress),
            # 0: as in toolkit 0.1.0, see toolkit.data.document_ends
            "document_ends": int(any(getattr(part, "add_bos", None) is not None for part in data_modules(data))),
            "schedule": asdict(state.schedule),
            "identity": asdict(state.fingerprint),
            "tied": {canonical_name(second): canonical_name(first) for second, first in state.model.tied.items()},
        }
        (folder / TRAINER / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        trainer_state = {"optimizer": snapshot.optimizer, "scaler": snapshot.scaler, "rng": snapshot.rng}
        save_state(trainer_state, folder / TRAINER / STATE)
        if snapshot.callbacks:
            save_state(snapshot.callbacks, folder / TRAINER / CALLBACKS)

    def restore(self, folder: Path, step: int) -> None:
        """Restore optimizer, scaler and random generators. The model already has its weights.

        If the number of ranks has changed, random generators are reseeded from seed, step and rank.
        """
        file = folder / TRAINER / STATE
        state = load_state(file)
        for name, kind in (("optimizer", dict), ("rng", list)):
            if not isinstance(state.get(name), kind):
                raise UserError(f"{file}: {name}: is missing or not a {kind.__name__}; resume from another checkpoint")
        may_be_empty = step == 0 or self.scaler is not None  # the scaler may have skipped all steps
        shards = folder / TRAINER / OPTIMIZER
        load_optimizer(
            self.module, self.optimizer, state["optimizer"], file, shards, may_be_empty, weights=folder / WEIGHTS
        )
        if self.scaler is not None:
            _load_scaler(self.scaler, state.get("scaler"), file)
        if len(state["rng"]) == ranks.world_size():
            try:
                set_rng_state(state["rng"][ranks.global_rank()], self.device)
            except Exception as error:  # invalid states raise arbitrary exceptions
                raise UserError(f"{file}: rng: {error}; resume from another checkpoint") from error
        else:
            seed_generators(self.config.args.seed, step, ranks.global_rank())


def _load_scaler(scaler: Any, saved: Any, file: Path) -> None:
    now = scaler.state_dict()
    if not isinstance(saved, dict) or {k: type(v) for k, v in saved.items()} != {k: type(v) for k, v in now.items()}:
        raise UserError(f"{file}: scaler: is not the state of a GradScaler; resume from another checkpoint")
    scaler.load_state_dict(saved)


def seed_generators(*entropy: int) -> None:
    """Seed all random generators of this process from ``entropy``."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> State:
    """Return the random states of this process and ``device`` as tensors and plain values."""
    version, keys, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    numpy_keys = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {
        "python": [version, list(keys), gauss],
        "numpy": [state["bit_generator"], numpy_keys, state["state"]["pos"], state["has_gauss"], state["gauss"]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: State, device: torch.device) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, *rest = state["numpy"]
    if not 0 <= rest[0] <= len(numpy_keys):
        raise ValueError(f"position {rest[0]} in the state of numpy's generator")  # numpy would read out of bounds
    np.random.set_state((name, numpy_keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
