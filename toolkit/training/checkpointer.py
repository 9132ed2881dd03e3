"""Law S2: everything that a run needs to go on where it stopped, written beside the weights in ``trainer/``."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.states import model_state, optimizer_state, set_optimizer_state
from toolkit.checkpoints.store import prune, write_checkpoint
from toolkit.checkpoints.weights import load_state, save_state
from toolkit.data.tokenizer import Tokenizer
from toolkit.models.config import ModelConfig
from toolkit.training.schedule import Schedule
from toolkit.training.state import FORMAT_VERSION, Identity, Progress


@dataclass
class Checkpointer:
    """Saves and restores one run. ``module`` is the model as the checkpoint names its weights."""

    out_dir: Path
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any | None
    config: ModelConfig
    tokenizer: Tokenizer | None
    hyperparameters: dict[str, Any]
    identity: Identity
    schedule: Schedule
    keep_last: int
    """Step checkpoints to keep; 0 keeps all."""

    def save(self, name: str, progress: Progress) -> Path:
        """Write the checkpoint folder ``out_dir/name``, whole or not at all, then delete what is too old."""

        def write(folder: Path) -> None:
            write_model_files(
                folder,
                state_dict=model_state(self.module),
                config=self.config,
                hyperparameters=self.hyperparameters,
                tokenizer=self.tokenizer,
            )
            self._write_trainer(folder / "trainer", progress)

        write_checkpoint(self.out_dir / name, write)
        if self.keep_last:
            prune(self.out_dir, self.keep_last)
        return self.out_dir / name

    def _write_trainer(self, folder: Path, progress: Progress) -> None:
        folder.mkdir()
        meta = {
            "format_version": FORMAT_VERSION,
            **asdict(progress),
            "schedule": asdict(self.schedule),
            "identity": asdict(self.identity),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        state = {
            "optimizer": optimizer_state(self.module, self.optimizer),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "rng": [rng_state()],
        }
        save_state(state, folder / "state.pth")

    def restore(self, folder: Path, rank: int) -> None:
        """Bring back the optimizer, the scaler and the random generators; the weights are in the model already.

        Raises:
            UserError: the file is broken.
        """
        state = load_state(folder / "trainer" / "state.pth")
        set_optimizer_state(self.module, self.optimizer, state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        set_rng_state(state["rng"][rank])


def rng_state() -> dict[str, Any]:
    """The states of all random generators of this process, as tensors and plain values."""
    version, keys, gauss = random.getstate()
    name, numpy_keys, *rest = np.random.get_state()
    return {
        "python": [version, list(keys), gauss],
        "numpy": [name, torch.from_numpy(numpy_keys.astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, *rest = state["numpy"]
    np.random.set_state((name, numpy_keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
