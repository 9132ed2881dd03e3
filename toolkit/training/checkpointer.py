"""S2 exact-resume: the state that a run needs to continue where it stopped, beside the weights in ``trainer/``.

All ranks save and restore together. The state of all ranks is gathered; rank 0 writes the folder. With ``sharded``
every rank writes its shards into it. If a rank cannot write, the save fails on all ranks.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from toolkit.checkpoints.adapters import write_adapter_files
from toolkit.checkpoints.finite import nonfinite_state
from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.sharded import check_sharded, save_sharded
from toolkit.checkpoints.run.states import adapter_state, full_state, sharded_state
from toolkit.checkpoints.store import WEIGHTS, prune, write_checkpoint
from toolkit.checkpoints.weights import canonical_name, load_state, save_state
from toolkit.checksums import Checksum, checksum_files
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed import ranks
from toolkit.errors import GuardError, PeerLostError, UserError, join_first
from toolkit.planning.limits import Progress
from toolkit.planning.resolve import ResolvedConfig
from toolkit.training.run_state import RunState
from toolkit.training.state import FORMAT_VERSION

TRAINER, STATE, OPTIMIZER = "trainer", "state.pth", "optimizer"


class _Snapshot(NamedTuple):
    """The state of one step, gathered from all ranks where it is not sharded."""

    progress: Progress
    rng: list[dict[str, Any]]  # by rank
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]  # of sharded checkpoints; of others they are part of the optimizer
    optimizer: dict[str, Any]


@dataclass
class Checkpointer:
    """Saves and restores one run.

    Args:
        config: Of the run.
        state: Its start and end.
        tokenizer: None if the data came as tokens without one.
        module: As the strategy has wrapped it.
        optimizer: Before Fabric has wrapped it.
        scaler: The GradScaler of 16-mixed, otherwise None.
        device: Where this rank computes.
    """

    config: ResolvedConfig
    state: RunState
    tokenizer: Tokenizer | None
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any | None
    device: torch.device

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its shards, instead of rank 0 one file."""
        return self.config.args.fsdp.state_dict_type == "sharded"

    def save(self, name: str, progress: Progress) -> Path:
        """Write the checkpoint folder ``out_dir/name``, complete or not at all, then delete what is too old.

        Raises:
            UserError: it cannot be written.
            GuardError: weights or optimizer state contain NaN or Inf; no checkpoint is created.
        """
        args, tied = self.config.args, self.state.model.tied
        folder = args.run_dir / name
        rng = ranks.all_gather_object(rng_state(self.device))
        # Not within the try: a rank that fails in these collectives must exit at once, because the others wait in them.
        moments: dict[str, torch.Tensor] = {}
        if self.state.base is not None:
            weights, rest = adapter_state(self.module, self.optimizer)
        elif self.sharded:
            weights, moments, rest = sharded_state(self.module, self.optimizer, tied)
        else:
            weights, rest = full_state(self.module, self.optimizer, tied)
        snapshot = _Snapshot(progress, rng, weights, moments, rest)
        error: Exception | None = None
        # Every rank searches its own shard on its own device: on a CPU 5 % of the time of the write, on idle cores.
        with ThreadPoolExecutor(1) as pool:
            search = pool.submit(nonfinite_state, self.module, self.optimizer)
            try:
                self._write_folder(folder, snapshot, search)
                if args.train.keep_last and ranks.global_rank() == 0:
                    prune(folder.parent, args.train.keep_last)
            except Exception as caught:
                error = caught
        if ranks.all_reduce_sum(failed=int(error is not None))["failed"]:
            if error is None or (ranks.global_rank() != 0 and not isinstance(error, GuardError)):
                known_to_all = isinstance(error, RuntimeError) and isinstance(error.__cause__, OSError)
                raise PeerLostError(f"{folder} could not be written") from (None if known_to_all else error)
            raise error
        return folder

    def _write_folder(self, folder: Path, snapshot: _Snapshot, search: Future[list[str]]) -> None:
        """Write on all ranks, agree that all succeeded, then rename the folder into place on rank 0."""

        def write_own(tmp: Path) -> dict[str, Checksum]:
            checksums = {}
            if self.sharded:
                save_sharded(snapshot.weights, tmp / WEIGHTS)
                save_sharded(snapshot.moments, tmp / TRAINER / OPTIMIZER)
                checksums = checksums_of_shards(tmp)
            _require_finite(folder, search)
            return checksums

        if ranks.global_rank() != 0:
            tmp: Path | None = ranks.broadcast_from_rank0(None)
            if tmp is not None:
                write_own(tmp)
            return
        is_announced = False

        def write(tmp: Path) -> dict[str, Checksum]:
            nonlocal is_announced
            self._write(tmp, snapshot)
            is_announced = True
            ranks.broadcast_from_rank0(tmp)
            checksums = write_own(tmp)
            if self.sharded:
                for shards in (tmp / WEIGHTS, tmp / TRAINER / OPTIMIZER):
                    check_sharded(shards)  # fails where the nodes do not share the disk
            return checksums

        try:
            write_checkpoint(folder, write)
        finally:
            if not is_announced:  # the other ranks wait for the folder's name
                ranks.broadcast_from_rank0(None)

    def _write(self, folder: Path, snapshot: _Snapshot) -> None:
        """Write everything but the shards."""
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
        (folder / TRAINER).mkdir()
        meta = {
            "format_version": FORMAT_VERSION,
            **asdict(snapshot.progress),
            "schedule": asdict(state.schedule),
            "identity": asdict(state.fingerprint),
            "tied": {canonical_name(second): canonical_name(first) for second, first in state.model.tied.items()},
        }
        (folder / TRAINER / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        scaler = None if self.scaler is None else self.scaler.state_dict()
        trainer_state = {"optimizer": snapshot.optimizer, "scaler": scaler, "rng": snapshot.rng}
        save_state(trainer_state, folder / TRAINER / STATE)

    def restore(self, folder: Path, step: int) -> None:
        """Restore the optimizer, the scaler and the random generators; the model already has its weights.

        If the number of ranks has changed, the random states are new: a function of seed, step and rank.

        Raises:
            UserError: a file is damaged, or an entry of it is missing, unknown or of the wrong type.
        """
        file = folder / TRAINER / STATE
        state = load_state(file)
        for name, kind in (("optimizer", dict), ("rng", list)):
            if not isinstance(state.get(name), kind):
                raise UserError(f"{file}: {name}: is missing or no {kind.__name__}; resume from another checkpoint")
        may_be_empty = step == 0 or self.scaler is not None  # which may have skipped all steps
        shards = folder / TRAINER / OPTIMIZER
        load_optimizer(self.module, self.optimizer, state["optimizer"], file, shards, may_be_empty)
        if self.scaler is not None:
            _load_scaler(self.scaler, state.get("scaler"), file)
        if len(state["rng"]) == ranks.world_size():
            try:
                set_rng_state(state["rng"][ranks.global_rank()], self.device)
            except Exception as error:  # these functions raise anything for invalid states
                raise UserError(f"{file}: rng: {error}; resume from another checkpoint") from error
        else:
            seed_generators(self.config.args.seed, step, ranks.global_rank())


def _require_finite(folder: Path, search: Future[list[str]]) -> None:
    """Check that the search of no rank has found weights or optimizer state that are not finite.

    Raises:
        GuardError: it has, on some rank; on every rank.
        PeerLostError: the search itself failed on another rank. On that rank, its own error.
    """
    error = search.exception()
    found = [] if error is not None else search.result()
    votes = ranks.all_reduce_sum(failed=int(error is not None), nonfinite=len(found))
    if votes["failed"]:  # only now: the other ranks take part in this collective, too
        raise error if error is not None else PeerLostError(f"{folder} could not be checked for NaN and Inf")
    if votes["nonfinite"]:
        names = sorted({name for names in ranks.all_gather_object(found) for name in names})
        raise GuardError(
            f"{folder} was not saved: NaN, Inf or too large numbers in {join_first(names)}; lower "
            "--train.learning_rate and resume with --resume auto (continues from the latest checkpoint)"
        )


def _load_scaler(scaler: Any, saved: Any, file: Path) -> None:
    own = scaler.state_dict()
    if not isinstance(saved, dict) or {k: type(v) for k, v in saved.items()} != {k: type(v) for k, v in own.items()}:
        raise UserError(f"{file}: scaler: is not the state of a GradScaler; resume from another checkpoint")
    scaler.load_state_dict(saved)


def checksums_of_shards(folder: Path) -> dict[str, Checksum]:
    """Return the checksums of all ranks' shards: each computes those of the files that it has just written.

    Raises:
        RuntimeError: a rank cannot read them; on every rank.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"__{ranks.global_rank()}_*.distcp")]
    own: dict[str, Checksum] | OSError
    try:
        own = checksum_files(folder, names)
    except OSError as error:
        own = error
    checksums: dict[str, Checksum] = {}
    for rank, found in enumerate(ranks.all_gather_object(own)):
        if isinstance(found, OSError):
            raise RuntimeError(f"rank {rank} could not read {folder}: {found}") from found
        checksums |= found
    return checksums


def seed_generators(*entropy: int) -> None:
    """Seed all random generators of this process, as a function of ``entropy``."""
    seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """Return the states of the random generators of this process and its device, as tensors and plain values."""
    version, keys, gauss = random.getstate()
    state = np.random.get_state(legacy=False)
    numpy_keys = torch.from_numpy(state["state"]["key"].astype(np.int64))
    return {
        "python": [version, list(keys), gauss],
        "numpy": [state["bit_generator"], numpy_keys, state["state"]["pos"], state["has_gauss"], state["gauss"]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, *rest = state["numpy"]
    if not 0 <= rest[0] <= len(numpy_keys):
        raise ValueError(f"position {rest[0]} in the state of numpy's generator")  # it would read beyond the end
    np.random.set_state((name, numpy_keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
