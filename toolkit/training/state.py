"""How far a run has come, and what it is: ``trainer/meta.json`` of a checkpoint folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

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
        for name in ("data", "global_batch_size", "seed", "precision"):
            flag = "train.global_batch_size" if name == "global_batch_size" else name
            old, new = saved.get(name), getattr(self, name)
            if old != new:
                raise UserError(f"--{flag} {_short(new)}: {folder} was trained with {_short(old)}; {_mend(name)}")
        for group in ("optimizer", "model_config", "adapters"):
            old_options, new_options = saved.get(group, {}), json.loads(json.dumps(getattr(self, group)))
            flag = "--" if group == "adapters" else f"--{group}."
            for name in sorted(
                (old_options.keys() | new_options.keys()) - ({"name"} if group == "model_config" else set())
            ):
                old, new = old_options.get(name), new_options.get(name)
                if old != new:
                    raise UserError(
                        f"{flag}{name} {_short(new)}: {folder} was trained with {_short(old)}; {_mend(name)}"
                    )


def _short(value: Any) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) > 40 else str(value)


def _mend(name: str) -> str:
    if name == "data":
        return "the text, the tokenizer or --train.max_seq_length has changed; give the same, or another --out_dir"
    return "give the same, or another --out_dir"


def read_meta(folder: Path) -> dict[str, Any]:
    """Read ``trainer/meta.json``.

    Raises:
        UserError: it is missing, broken, or of a format that this version does not know.
    """
    path = folder / "trainer" / "meta.json"
    try:
        meta = json.loads(path.read_text())
        version = meta["format_version"]
        _ = [meta[name] for name in ("step", "tokens", "samples", "seconds", "schedule", "identity")]
    except FileNotFoundError:
        raise UserError(
            f"--resume {folder}: holds weights but no trainer state; use --initial_checkpoint_dir {folder}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not readable ({error}); resume from an older checkpoint") from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this version of toolkit reads {FORMAT_VERSION}")
    return meta
