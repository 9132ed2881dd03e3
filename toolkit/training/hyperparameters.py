"""The options of a run as its checkpoints, logs and pages have them."""

from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from toolkit.config import AUTO, OPTIMIZER_SHORTHANDS, RunOptions
from toolkit.config.classes import class_path
from toolkit.data.base import DataModule, data_modules
from toolkit.data.tokens.rows import PythonData
from toolkit.extension import registered, split_names
from toolkit.models.families import extension_of
from toolkit.models.lora_config import LoRAConfig
from toolkit.objectives import NextToken, Objective
from toolkit.planning.resolve import ResolvedConfig
from toolkit.planning.run_args import Changes, RunArgs, with_options


def resolved_hyperparameters(config: ResolvedConfig) -> dict[str, Any]:
    """Return the options that reproduce a run, see :func:`hyperparameters`."""
    options = config.args.optimizer.options
    names = [n for n in OPTIMIZER_SHORTHANDS if n in config.optimizer and n not in options]
    changes: Changes = {f"optimizer.{name}": config.optimizer[name] for name in names}
    if config.optimizer["name"] == "Muon":
        changes["optimizer.options"] = options | {"split_qkv": config.optimizer.get("split_qkv", False)}
    # On a CPU auto resolves to none; save auto so that a rerun on CUDA compiles
    if "compiler" in config.reasons and config.device != "cuda":
        changes["compiler"] = AUTO
    return hyperparameters(with_options(config.args, changes | {"precision": config.precision}))


def hyperparameters(args: RunArgs) -> dict[str, Any]:
    """Return a run's options in the format of ``toolkit SUB --config``. Data from Python is named by class."""
    values: dict[str, Any] = {"checkpoint_dir": args.initial_checkpoint_dir}
    if not args.is_finetune:
        values = {name: getattr(args, name) for name in ("model_name", "model_config", "initial_checkpoint_dir")}
    if args.lora is not None:
        lora = args.lora if args.from_peft is None else LoRAConfig()  # --from_peft defines the values
        values |= lora.to_options() | {n: getattr(args, n) for n in ("loraplus_lr_ratio", "from_peft", "quantize")}
    shared = [f.name for f in fields(RunOptions) if f.name not in ("dry_run", "max_restarts")]
    names = ["data", "train", "eval", "optimizer", "out_dir", "precision", *shared]
    values |= {name: getattr(args, name) for name in names} | {"resume": False}
    values |= {name: group for name, group in args.groups.items() if group != type(group)()}
    plain = {k: asdict(v) if is_dataclass(v) and not isinstance(v, type) else v for k, v in values.items()}
    if "model_config" in plain:
        plain["model_config"] = {k: v for k, v in plain["model_config"].items() if v is not None}
    options = {} if isinstance(args.data, PythonData) else plain["data"]
    plain["data"] = {"class_path": class_path(type(args.data), DataModule), "init_args": options}
    if objective := objective_entry(args.objective):
        plain["objective"] = objective
    return plain | ({"extensions": extensions} if (extensions := used_extensions(args)) else {})


def objective_entry(objective: Objective) -> dict[str, Any]:
    """Return an objective's YAML entry, class_path and init_args; empty for next-token prediction."""
    if objective == NextToken():
        return {}
    options = {f.name: getattr(objective, f.name) for f in fields(cast("Any", objective)) if f.init}
    return {"class_path": class_path(type(objective), Objective), "init_args": options}


def keep_old_ends(data: DataModule) -> None:
    """Set ``add_bos`` to None where it is auto: the rule of a run that an older version began."""
    for module in data_modules(data):
        if getattr(module, "add_bos", None) == AUTO:
            module.add_bos = None  # type: ignore[attr-defined]


def callback_entries(value: str | list[Any] | None) -> list[Any]:
    """Return the entries of ``--callbacks``: class paths, and mappings with ``class_path`` and ``init_args``."""
    return [path.strip() for path in value.split(",")] if isinstance(value, str) else value or []


def callback_paths(args: RunArgs) -> list[str]:
    """Return the class paths and extension names in ``--callbacks``."""
    return [entry if isinstance(entry, str) else entry.get("class_path") for entry in callback_entries(args.callbacks)]


def used_extensions(args: RunArgs) -> list[str]:
    """Return the extensions that a run uses, see :func:`toolkit.extension.extensions`."""
    used = {
        "data": [type(module).__name__ for module in data_modules(args.data)],
        "compilers": [args.compiler],
        "strategies": [args.strategy],
        "loggers": split_names(args.logger_name),
        "callbacks": callback_paths(args),
        "optimizers": [args.optimizer.name],
        "objectives": [type(args.objective).__name__],
        "option_groups": [name for name, group in args.groups.items() if group != type(group)()],
    }
    origins = [entry.origin for kind, names in used.items() for n, entry in registered(kind).items() if n in names]
    if args.base_dir is None and args.module is None and (origin := extension_of(args.model_name)) is not None:
        origins.append(origin)
    return [origin for origin in dict.fromkeys(origins) if origin != "toolkit"]
