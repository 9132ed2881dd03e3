"""S2 exact-resume: save and restore the weights and, in ``trainer/``, the state to continue from.

Saving and restoring are collective. Rank 0 gathers the state and writes the folder. With ``sharded`` every rank writes
its shards into the folder. If a rank cannot write, the save fails on all ranks.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from toolkit.checkpoints.adapters import write_adapter_files
from toolkit.checkpoints.finite import nonfinite_state
from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.run.host_copy import HostCopies
from toolkit.checkpoints.run.optimizer_state import load_optimizer
from toolkit.checkpoints.run.state_dicts import adapter_state, full_state, full_weights, sharded_state
from toolkit.checkpoints.store import MTP, PARTS, WEIGHTS, newest_first
from toolkit.checkpoints.weights import Tensors, load_state, save_state
from toolkit.data.base import State, data_modules
from toolkit.distributed import ranks
from toolkit.distributed.names import canonical_name
from toolkit.errors import UserError
from toolkit.io.atomic import link_or_copy
from toolkit.io.paths import require_inside
from toolkit.io.threads import run_in_thread
from toolkit.models.lora_config import is_adapter
from toolkit.optim.evaluation_weights import EvaluationWeights
from toolkit.training.checkpoint_meta import CALLBACKS, FORMAT_VERSION, TRAINER
from toolkit.training.hyperparameters import resolved_hyperparameters
from toolkit.training.launch import Launch
from toolkit.training.pending_save import PendingSave, Snapshot
from toolkit.training.time_breakdown import SAVE
from toolkit.ui.loggers import rows_crc

STATE, OPTIMIZER = "state.pth", "optimizer"
REPORT_WAITS_OVER_S = 1.0  # minimum wait for the previous checkpoint to report


class Checkpointer:
    """Saves and restores the checkpoints of a run. Every rank calls each method at the same step.

    At most one checkpoint is written at a time. It is committed after all ranks have written.

    Args:
        module: The model as the strategy wraps it.
        optimizer: The optimizer before Fabric wraps it.

    Attributes:
        evaluation_weights: The weights to save, if they are not the trained ones.
        pending: The save in progress; None to give it up.
        leaders: For each rank, the rank that publishes checkpoints on its disk; see
            :func:`~toolkit.training.rank_consistency.disk_leaders`.
    """

    def __init__(self, launch: Launch, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.launch, self.module, self.optimizer = launch, module, optimizer
        self.evaluation_weights = EvaluationWeights(optimizer, launch.args.train.ema)
        self.scaler: Any | None = getattr(launch.fabric.strategy.precision, "scaler", None)  # of 16-mixed
        self._train, self._display = launch.args.train, launch.display
        self._copies = HostCopies() if self._train.async_save else None
        self.pending: PendingSave | None = None
        self.leaders = [0] * ranks.world_size()
        self._written: Future[None] | None = None
        folders, config = (launch.resume_from, launch.args.base_dir), launch.spec.config
        is_language_model = launch.base is None and config is not None and config.head is None
        self._mtp_sources = [one for one in folders if is_language_model and one and (one / MTP).is_file()]

    @property
    def sharded(self) -> bool:
        """Whether every rank writes its shards; otherwise rank 0 writes one file."""
        return self.launch.args.fsdp.state_dict_type == "sharded"

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing its files."""
        return self._written is not None and not self._written.done()

    def save(self, name: str, callbacks: Callable[[], State]) -> Path:
        """Write ``out_dir/name`` atomically, and delete the oldest checkpoints. No other save may be in progress.

        Args:
            callbacks: Returns the callbacks' states by name. It may be collective, and take as long as the save.
        """
        with self._saving(), self.evaluation_weights.active():
            pending = self._begin(name, callbacks())
            pending.write_on_all_ranks()
            return pending.commit(self._train.keep_last)

    def start(self, name: str, callbacks: Callable[[], State]) -> None:
        """Start to write ``out_dir/name`` concurrently with training; arguments as in :meth:`save`."""
        with self._saving(), self.evaluation_weights.active():
            self.pending = self._begin(name, callbacks(), self._copies)
            self._written = run_in_thread(self.pending.write, name="checkpoint")

    def finish(self) -> Path | None:
        """Complete the save in progress and return its folder; None if there is none."""
        if (pending := self.pending) is None:
            return None
        with self._saving():
            self._wait(pending)
            self.pending = None
            return pending.commit(self._train.keep_last)

    def finish_alone(self) -> Path | None:
        """Complete the save in progress on rank 0, because the other ranks may have exited; None if it cannot.

        An unsharded checkpoint is committed, a sharded one is deleted.
        """
        pending, self.pending = self.pending, None
        if pending is None or ranks.global_rank() != 0:
            return None
        self._wait(pending, is_alone=True)
        if pending.is_sharded:
            pending.abandon()
            return None
        return pending.commit_alone(self._train.keep_last)

    def _wait(self, pending: PendingSave, is_alone: bool = False) -> None:
        """Wait until all ranks' files are written, or only this rank's if ``is_alone``."""
        assert self._written is not None
        started = time.perf_counter()
        if is_alone:
            wait([self._written])
        else:
            ranks.wait_for_future(self._written, pending.wait_reporter())
        if (seconds := time.perf_counter() - started) > REPORT_WAITS_OVER_S:
            self._display.message(f"waited {seconds:.1f} s until {pending.folder} was written")

    def export(self, folder: Path) -> None:
        """Write the model into an empty folder, complete or as adapters, on rank 0. Collective."""
        launch = self.launch
        if launch.base is not None:
            weights = adapter_state(self.module, self.optimizer)[0]
        else:
            weights = full_weights(self.module, launch.spec.tied)
        ranks.run_on_rank0(lambda: self._write_model(folder, weights))

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._display.phase("saving")
        timeouts = self.launch.timeouts
        with ranks.extended_timeout(timeouts.first, timeouts.later), record_function(SAVE):
            yield
        self._display.phase("training")

    def _begin(self, name: str, callbacks: State, copies: HostCopies | None = None) -> PendingSave:
        """Start a save of ``out_dir/name``. With ``copies`` training can overlap with the write."""
        # A rank that fails in these collectives must exit at once, because the others wait in them.
        rng = ranks.all_gather_object(rng_state(self.launch.fabric.device))
        launch, module, optimizer = self.launch, self.module, self.optimizer
        shards: dict[str, Tensors] = {}
        weights: Tensors = {}
        offload = copies is None  # HostCopies already copies to pinned memory
        if launch.base is not None:
            weights, rest = adapter_state(module, optimizer)
        elif self.sharded:
            shards[WEIGHTS], shards[f"{TRAINER}/{OPTIMIZER}"], rest = sharded_state(
                module, optimizer, launch.spec.tied, offload
            )
        else:
            weights, rest = full_state(
                module, optimizer, launch.spec.tied, offload or launch.config.strategy.kind == "fsdp"
            )
        scaler = None if self.scaler is None else self.scaler.state_dict()
        snapshot = Snapshot(deepcopy(launch.progress), rng, weights, rest, scaler, deepcopy(callbacks))
        if copies is not None:
            copies.begin(module, optimizer)
        # Every rank searches its shard on its device. On a CPU this takes 5 % of the write time, on idle cores.
        search = run_in_thread(lambda: nonfinite_state(module, optimizer))
        is_first_of_another_node = launch.world.local_rank == 0 and launch.world.global_rank != 0
        report = ranks.rank_print if is_first_of_another_node else self._display.message  # in each node's log
        folder = launch.out_dir / (PARTS if any(self.leaders) else "") / name
        return PendingSave(folder, snapshot, self._write, shards, self._shapes(), search, report, copies, self.leaders)

    def _shapes(self) -> dict[str, torch.Size]:
        """Return the shapes to save, by name; empty for a user-provided module."""
        spec = self.launch.spec
        if self.launch.base is not None:
            return {name: shape for name, shape in spec.shapes.items() if is_adapter(name)}
        return {name: shape for name, shape in spec.shapes.items() if not (self.sharded and name in spec.tied)}

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        """Write everything except the shards."""
        launch, args = self.launch, self.launch.args
        self._write_model(folder, None if self.sharded else snapshot.weights)
        (folder / TRAINER).mkdir(exist_ok=True)  # other ranks' shards may have created it
        rows = snapshot.progress.logged_rows
        snapshot.progress.metrics_crc = rows_crc(args.run_dir / "logs" / "metrics.csv", rows)
        meta = {
            "format_version": FORMAT_VERSION,
            "keyed_dropout": True,
            **asdict(snapshot.progress),
            # 0: as in toolkit 0.1.0, see toolkit.data.text.documents
            "document_ends": int(any(getattr(part, "add_bos", None) is not None for part in data_modules(args.data))),
            "schedule": asdict(launch.schedule),
            "identity": asdict(launch.fingerprint),
            "data_parallel": launch.config.batch.data_parallel,
            "tied": {canonical_name(second): canonical_name(first) for second, first in launch.spec.tied.items()},
        }
        (folder / TRAINER / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        trainer_state = {"optimizer": snapshot.optimizer, "scaler": snapshot.scaler, "rng": snapshot.rng}
        save_state(trainer_state, folder / TRAINER / STATE)
        if snapshot.callbacks:
            save_state(snapshot.callbacks, folder / TRAINER / CALLBACKS)
        self._copy_mtp(folder)

    def _copy_mtp(self, folder: Path) -> None:
        """Link the base model's MTP weights from the newest checkpoint, which is on the same disk, or from the base."""
        sources = [*newest_first(self.launch.out_dir), *self._mtp_sources] if self._mtp_sources else []
        if (source := next((one for one in sources if (one / MTP).is_file()), None)) is not None:
            require_inside(source / MTP, source)
            link_or_copy(source / MTP, folder / MTP)
        elif sources:
            self._display.message(f"warning: {sources[-1] / MTP} was deleted; copy it back to keep it in checkpoints")

    def _write_model(self, folder: Path, weights: Tensors | None) -> None:
        """Write complete weights or adapters, if given, and the files of the model."""
        launch = self.launch
        if launch.base is not None:
            assert weights is not None  # adapters are not sharded
            write_adapter_files(folder, weights, launch.base)
        write_model_files(
            folder,
            state_dict=None if launch.base is not None else weights,
            config=launch.spec.config,
            hyperparameters=resolved_hyperparameters(launch.config) if launch.args.is_repeatable else None,
            tokenizer=launch.data.tokenizer,
        )

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
        self.evaluation_weights.restore()
        rank, name = ranks.global_rank(), "scaler"
        try:
            if self.scaler is not None:
                types = self.scaler.state_dict().items()  # which it does not check itself
                if wrong := [key for key, value in types if type(state[name][key]) is not type(value)]:
                    raise TypeError(f"{wrong[0]} has another type")
                self.scaler.load_state_dict(state[name])
            name = "rng"
            if len(state[name]) == ranks.world_size():
                set_rng_state(state[name][rank], self.launch.fabric.device)
            else:
                seed_generators(self.launch.args.seed, step, rank)
        except Exception as error:  # invalid states raise arbitrary exceptions
            raise UserError(f"{file}: {name}: {error}; resume from another checkpoint") from error


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
