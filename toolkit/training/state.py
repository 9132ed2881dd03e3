"""How far a run has come, and what it is: ``trainer/meta.json`` of a checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.untrusted import read_json

FORMAT_VERSION = 1


@dataclass
class Progress:
    """How far a run has come.

    Args:
        step: Optimizer steps done.
        tokens: Input tokens so far, over all ranks.
        samples: The position in the stream of samples, over all ranks.
        seconds: Of all launches together.
        best_val_loss: Of the checkpoint in ``best/``, where there is one.
    """

    step: int = 0
    tokens: int = 0
    samples: int = 0
    seconds: float = 0.0
    best_val_loss: float | None = None


@dataclass(frozen=True)
class Identity:
    """What may not change between the launches of a run."""

    model_config: dict[str, Any]
    data: str
    global_batch_size: int
    seed: int
    precision: str
    optimizer: dict[str, Any]
    adapters: dict[str, Any] = field(default_factory=dict)
    """Options of low-rank adapters, by flag, and what they stand on; empty where all weights are trained."""

    def require_same(self, saved: dict[str, Any], folder: Path) -> None:
        """Compare with what a checkpoint was made with.

        Raises:
            UserError: something differs; the message names the flag and both values.
        """
        now = json.loads(json.dumps(asdict(self)))
        if bool(saved.get("adapters")) != bool(now["adapters"]):
            command = "finetune_lora" if saved.get("adapters") else "pretrain or finetune_full"
            raise UserError(
                f"--resume {folder}: is of a run of {command}; resume it with that, or give another --out_dir"
            )
        for name in ("data", "global_batch_size", "seed", "precision"):
            flag = "train.global_batch_size" if name == "global_batch_size" else name
            _require_equal(f"--{flag}", saved.get(name), now[name], folder)
        for group in ("optimizer", "model_config", "adapters"):
            old, new = saved.get(group, {}), now[group]
            for name in sorted((old.keys() | new.keys()) - ({"name"} if group == "model_config" else set())):
                flag = f"--{name}" if group == "adapters" else f"--{group}.{name}"
                _require_equal(flag, old.get(name), new.get(name), folder)


# Of these only a hash is kept: what may have changed is all that can be said.
_HASHED = {
    "--data": "other data: the files, the tokenizer, the template, an option of --data, --train.max_seq_length",
    "--checkpoint_dir": "another base: its weights differ from those of this one",
}


def _require_equal(flag: str, old: Any, new: Any, folder: Path) -> None:
    if old == new:
        return
    mend = "give the same, or another --out_dir"
    if flag in _HASHED:
        raise UserError(f"{flag}: {folder} was trained with {_HASHED[flag]}; {mend}")
    raise UserError(f"{flag} {new}: {folder} was trained with {old}; {mend}")


def read_meta(folder: Path) -> dict[str, Any]:
    """Read ``trainer/meta.json``.

    Raises:
        UserError: it is missing, broken, or of a format that this version does not know.
    """
    path = folder / "trainer" / "meta.json"
    try:
        meta = read_json(path)
        version = meta["format_version"]
        _ = [meta[name] for name in ("step", "tokens", "samples", "seconds", "schedule", "identity")]
    except FileNotFoundError:
        raise UserError(
            f"--resume {folder}: holds weights but no trainer state; use --initial_checkpoint_dir {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}); resume from an older checkpoint") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this version of toolkit reads {FORMAT_VERSION}")
    return meta
