"""``trainer/meta.json`` of a checkpoint: the run's progress and the values that must not change on resume."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.manifest import DamagedCheckpointError
from toolkit.checkpoints.store import newest_first, step_in_name
from toolkit.checkpoints.weights import load_state
from toolkit.config import OptimizerArgs
from toolkit.data.cache import hash_inputs
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError, one_line, option_text
from toolkit.io.safe_parse import read_json
from toolkit.models.config import Fields, ModelConfig
from toolkit.models.config_checks import has_type, types_and_choices
from toolkit.models.lora_config import PARTS
from toolkit.optim.schedule import Schedule
from toolkit.planning.frozen import find_frozen
from toolkit.planning.limits import Progress
from toolkit.planning.run_args import RunArgs
from toolkit.training.hyperparameters import objective_entry

FORMAT_VERSION = 1
TRAINER, CALLBACKS = "trainer", "callbacks.pth"


@dataclass(frozen=True)
class RunFingerprint:
    """Values that must not change between the launches of a run."""

    model_config: Fields
    data: str
    global_batch_size: int
    seed: int
    precision: str
    optimizer: Fields
    objective: Fields = field(default_factory=dict)
    """``class_path`` and ``init_args``; empty for next-token prediction."""
    adapters: Fields = field(default_factory=dict)
    """Options of low-rank adapters and the hash of their base, by flag; empty if all weights are trained."""

    def check_matches(self, saved: Fields, folder: Path) -> None:
        """Raise UserError if a value differs from the checkpoint's ``saved`` fingerprint."""
        now = json.loads(json.dumps(asdict(self)))
        if bool(saved.get("adapters")) != bool(now["adapters"]):
            command = "finetune_lora" if saved.get("adapters") else "pretrain or finetune_full"
            raise UserError(
                f"--resume {folder}: was written by {command}; resume it with that command, or give another --out_dir"
            )
        saved = saved | {"model_config": _with_new_fields(saved.get("model_config", {}))}
        if saved.get("adapters"):  # an older version did not have all parts
            saved["adapters"] = {f"lora_{part}": False for part in PARTS} | saved["adapters"]
        old, new = values_by_flag(saved), values_by_flag(now)
        for flag in new | old:
            _require_equal(flag, old.get(flag), new.get(flag), folder)


def model_fingerprint(folder: Path) -> str:
    """Return the SHA-256 (hex) of a checkpoint's weights and of its architecture, without the name."""
    config = {name: value for name, value in read_model_config(folder).to_dict().items() if name != "name"}
    return hash_inputs({"weights": base_fingerprint(folder), "config": config})


def objective_fingerprint(args: RunArgs) -> dict[str, Any]:
    """Return the objective's options with the fingerprint of another model instead of its folder.

    A resumed run may change fields with ``compare=False``.
    """
    entry = objective_entry(args.objective)
    for item in fields(cast(Any, args.objective)):
        if not item.compare:
            entry["init_args"].pop(item.name, None)
    for option, folder in (
        (args.objective.frozen_option, find_frozen(args.objective)),
        ("reference_dir", args.reference_dir),
    ):
        if folder is not None:
            entry["init_args"][option] = model_fingerprint(folder)
    return entry


def _with_new_fields(config: Fields) -> Fields:
    """Add the fields of ModelConfig that an older version did not have; it computed what their defaults do."""
    defaults = {item.name: item.default for item in fields(ModelConfig) if item.default is not MISSING}
    return defaults | config if "family" in config else config  # a user-provided module has other fields


def values_by_flag(fingerprint: Fields) -> Fields:
    """Return the values of a :class:`RunFingerprint` by flag; the data's value is its hash."""
    values = {f"--{name}": fingerprint.get(name) for name in ("data", "train.global_batch_size", "seed", "precision")}
    values["--train.global_batch_size"] = fingerprint.get("global_batch_size")
    flags = {item.name: f"--optimizer.{item.name}" for item in fields(OptimizerArgs)}
    flags |= {"loraplus_lr_ratio": "--loraplus_lr_ratio", "ema": "--train.ema"}
    for name, value in sorted(fingerprint.get("optimizer", {}).items()):
        values[flags.get(name, f"--optimizer.options {name}")] = value
    for group, prefix in (("model_config", "--model_config."), ("adapters", "--")):
        values |= {prefix + name: value for name, value in sorted(fingerprint.get(group, {}).items())}
    values |= {f"--qat.{name}": value for name, value in (values.pop("--model_config.qat", None) or {}).items()}
    objective = fingerprint.get("objective", {})
    values["--objective"] = objective.get("class_path")
    values |= {f"--objective.{name}": value for name, value in sorted(objective.get("init_args", {}).items())}
    values.pop("--model_config.name", None)  # one architecture may have several names
    return values


# Only hashes of these are stored, so a message can only list what may have changed.
_HASHED = {
    "--data": "other data: the files, the tokenizer, the template, an option of --data, --train.max_seq_length",
    "--checkpoint_dir": "another base model with different weights",
    "--objective.teacher_dir": "another teacher with different weights or architecture",
    "--objective.reference_dir": "another reference model with different weights or architecture",
}


def _require_equal(flag: str, old: Any, new: Any, folder: Path) -> None:
    if old == new:
        return
    shown, trained = flag, f"with {_HASHED.get(flag)}"
    if flag not in _HASHED:
        shown = flag if new is None else f"{flag} {option_text(new)}"
        trained = "without it" if old is None else f"with {flag} {option_text(old)}"
    raise UserError(f"{shown}: {folder} was trained {trained}; give the same, or another --out_dir")


def read_meta(folder: Path) -> Fields:
    """Read and validate ``trainer/meta.json``: names, types, ranges and consistency."""
    path = folder / "trainer" / "meta.json"
    try:
        meta = read_json(path)
        if not isinstance(meta, dict):
            raise ValueError("must be a mapping")
        version = meta["format_version"]
        if version == FORMAT_VERSION:
            _check_meta(meta, step_in_name(folder.name))
    except FileNotFoundError:
        raise UserError(
            f"--resume {folder}: holds weights but no trainer state; use --initial_checkpoint_dir {folder}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else one_line(error)
        raise DamagedCheckpointError(f"{path}: damaged: {reason:.200}; resume from an older checkpoint") from None
    if version != FORMAT_VERSION:
        raise UserError(
            f"{path}: format version {version!r:.20}, this version of toolkit reads {FORMAT_VERSION}; upgrade toolkit"
        )
    return meta


def read_callback_states(folder: Path) -> dict[str, Fields]:
    """Read callback states by name. Older checkpoints store KeepBest's and EarlyStopping's state in ``meta.json``."""
    file, meta = folder / TRAINER / CALLBACKS, read_meta(folder)
    if file.exists():
        states = load_state(file)
        if not all(isinstance(state, dict) for state in states.values()):
            raise UserError(f"{file}: must hold a dictionary for each callback; resume from another checkpoint")
    else:
        file = file.with_name("meta.json")
        best, lowest, stale = (meta.get(name) for name in ("best_val_loss", "lowest_val_loss", "stale_validations"))
        states = {} if best is None else {"KeepBest": {"val_loss": best}}
        states |= {} if lowest is None else {"EarlyStopping": {"val_loss": lowest, "stale_validations": stale or 0}}
    for name in ("KeepBest", "EarlyStopping"):
        for key, value in states.get(name, {}).items():
            if not isinstance(value, float | int | None):
                raise UserError(f"{file}: {name}: {key} {value!r:.50} is no number; resume from another checkpoint")
    return states


def _check_meta(meta: Fields, step_in_name: int | None) -> None:
    """Raise ValueError or KeyError for an invalid field, naming it."""
    for prefix, values, cls in (
        ("", meta, Progress),
        ("schedule.", meta["schedule"], Schedule),
        ("identity.", meta["identity"], RunFingerprint),
    ):
        if not isinstance(values, dict):
            raise ValueError(f"{prefix[:-1]} must be a mapping")
        _check_fields(prefix, values, cls)
    step, samples, batch = meta["step"], meta["samples"], meta["identity"]["global_batch_size"]
    if step_in_name not in (None, step):
        raise ValueError(f"step {step} in a folder named for step {step_in_name}")
    # may be less than a batch per step, because the last batch of an epoch may be short
    if not step <= samples <= step * batch:
        raise ValueError(f"samples {samples} do not match {step} steps with global_batch_size {batch}")


def _check_fields(prefix: str, values: Fields, cls: type) -> None:
    """Check values against a dataclass's fields: names and types. Numbers must be finite and not negative."""
    hints = get_type_hints(cls)
    checked = cls(**{name: value for name, value in values.items() if name in hints})  # TypeError names a missing one
    for name, hint in hints.items():
        value, (types, _) = getattr(checked, name), types_and_choices(hint)
        if not has_type(value, types):
            raise ValueError(f"{prefix}{name} {value!r:.50} is not of type {' or '.join(t.__name__ for t in types)}")
        if isinstance(value, int | float) and value < 0:
            raise ValueError(f"{prefix}{name} {value} must not be negative")


def uses_old_ends(resume_from: Path | None) -> bool:
    """Whether the run to resume began with a version whose text for pretraining has no bos."""
    return _holds(resume_from, lambda folder: not read_meta(folder).get("document_ends"))


def uses_old_tokenizer(tokenizer_dir: str | Path | None, resume_from: Path | None) -> bool:
    """Whether the run to resume began with a version that read the files of ``tokenizer_dir`` differently."""
    if tokenizer_dir is None or resume_from is None:
        return False
    old, new = (Tokenizer.load(tokenizer_dir, is_own=is_own).fingerprint for is_own in (True, None))
    return old != new and _holds(resume_from, lambda folder: Tokenizer.load(folder).fingerprint == old)


def _holds(resume_from: Path | None, predicate: Callable[[Path], bool]) -> bool:
    """Whether something holds of the newest readable checkpoint of the run to resume; False without one."""
    for folder in [] if resume_from is None else [resume_from, *newest_first(resume_from.parent)]:
        with suppress(UserError):  # a damaged checkpoint is reported later, and an older one may be used
            return predicate(folder)
    return False
