"""Mistakes that show without torch, which takes seconds to import; resolving the run finds them again."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.remote.run import check_out_dir
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import ADAPTERS, WEIGHTS
from toolkit.config import AUTO
from toolkit.config.command import classes_of
from toolkit.data import DataModule, HuggingFaceText
from toolkit.data.chat.sources import require_style
from toolkit.data.sft.instruct import InstructionData
from toolkit.distributed.world import detect_world
from toolkit.errors import UserError, did_you_mean, require_bitsandbytes
from toolkit.extension import find_modules_here, registered
from toolkit.io.paths import is_url
from toolkit.io.storage import Storage
from toolkit.models.families import DEFAULT_MODEL, get_config
from toolkit.models.lora_config import LoRAConfig
from toolkit.planning.batch import plan_batch
from toolkit.planning.compatibility import check_in_backward
from toolkit.planning.limits import require_profiled_steps, unknown_rows_error
from toolkit.planning.speed.cards import card_for
from toolkit.ui.loggers import check_loggers


def check_early(command: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a command before torch is imported.

    Does nothing where a launcher started this process: others wait for its report, and rank 0 may have begun to write.
    """
    for name in ("run", "shared", "adapters"):
        value = arguments.get(name, {})
        arguments = {**arguments, **(value if isinstance(value, Mapping) else vars(value))}
    if "out_dir" in arguments and "num_nodes" in arguments and command != "plan":
        detect_world(arguments["devices"], arguments["num_nodes"], None)
    if command == "plan" and arguments["speed"]:
        card_for(arguments["speed"], arguments["accelerator"])
    if {"LOCAL_RANK", "RANK", "SLURM_PROCID"} & os.environ.keys() or arguments.get("model_name") == "list":
        return
    folder = arguments.get("checkpoint_dir") or arguments.get("initial_checkpoint_dir")
    may_differ = command in ("verify", "consolidate", "plan")  # these take other folders, too
    if folder is not None and not may_differ and not (command == "merge_lora" and is_url(folder)):
        path = find_checkpoint_dir(folder)
        if command.startswith("finetune") and (path / ADAPTERS).exists() and not (path / WEIGHTS).exists():
            raise UserError(f"checkpoint_dir {folder}: holds adapters; run `toolkit merge_lora {folder}` first")
    if arguments.get("quantize") is not None and command != "plan":
        require_bitsandbytes(f"--quantize {arguments['quantize']}")
    if "train" not in arguments or command == "plan":
        return
    check_loggers(arguments["logger_name"], arguments["log"])
    if arguments["optimizer"].name == "AdamW8bit":
        require_bitsandbytes("--optimizer.name AdamW8bit")
    _check_names(arguments)
    if folder is None:
        get_config(arguments["model_name"] or DEFAULT_MODEL).override(arguments["model_config"])
    if "lora_r" in arguments:
        LoRAConfig.from_options(arguments)
    _check_batch(arguments, command == "finetune_lora")
    if arguments["profile"] and arguments["resume"] is False:
        require_profiled_steps(arguments["profiler"], arguments["train"].max_steps)
    train = arguments["train"]
    has_limit = train.max_steps is not None or train.max_tokens is not None
    if train.epochs is not None and not has_limit and isinstance(arguments["data"], HuggingFaceText):
        raise unknown_rows_error(train.epochs)
    is_untokenized = folder is None and arguments["tokenizer_dir"] is None
    if is_untokenized and isinstance(arguments["data"], InstructionData):
        name = type(arguments["data"]).__name__
        raise UserError(f"--data {name}: needs the tokenizer of the model; specify --tokenizer_dir")
    _check_files(arguments["data"])
    if command == "verify_parallel":
        return  # it writes nothing
    check_out_dir(arguments["out_dir"], arguments["staging_dir"])
    if is_url(arguments["resume"]):
        Storage(arguments["resume"], "--resume")  # is its package installed?
    elif not is_url(arguments["out_dir"]) and arguments["out_dir"]:
        resolve_resume(arguments["resume"], Path(arguments["out_dir"]))


def _check_names(arguments: Mapping[str, Any]) -> None:
    """Check the names of the optimizer and of callbacks without importing them."""
    name, spec = arguments["optimizer"].name, importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        known = set(re.findall(r'"(\w+)"', Path(spec.origin).with_name("optim").joinpath("__init__.py").read_text()))
        known = {n for n in known | {"Muon", "AdamW8bit", *registered("optimizers")} if n[0].isupper()} - {"Optimizer"}
        if known and name.lower() not in map(str.lower, known | registered("optimizers").keys()):
            raise UserError(f"--optimizer.name {name}: not in torch.optim{did_you_mean(name, known)}")
    for path in arguments["callbacks"].split(",") if isinstance(arguments["callbacks"], str) else ():
        find_modules_here()
        if "." in path and importlib.util.find_spec(path.strip().partition(".")[0]) is None:
            raise UserError(f"--callbacks {path}: no such class, here or among the installed packages")


def _check_batch(arguments: Mapping[str, Any], has_adapters: bool) -> None:
    train, devices, num_nodes = arguments["train"], arguments["devices"], arguments["num_nodes"]
    micro, nodes = (1 if value in (None, AUTO) else value for value in (train.micro_batch_size, num_nodes))
    if (devices, arguments["accelerator"]) == (AUTO, "cpu"):
        devices = 1
    sizes = (train.global_batch_size, micro, devices, nodes)
    are_known = all(isinstance(size, int) and size > 0 for size in sizes) and arguments["preset"] == "balanced"
    batch = plan_batch(*sizes) if are_known else None
    if arguments["optimizer"].in_backward:
        check_in_backward(
            has_adapters=has_adapters,
            world_size=1 if batch is None else batch.world_size,
            accumulation=1 if batch is None or train.micro_batch_size == AUTO else batch.accumulation,
            max_norm=train.max_norm,
            precision=arguments["precision"],
            is_torch_optimizer=True,
        )


def _check_files(data: Any) -> None:
    """Check the paths of toolkit's own data modules."""
    if type(data) not in classes_of(DataModule).values():
        return
    if getattr(data, "prompt_style", None):
        require_style(data.prompt_style)
    for name, value in vars(data).items():
        if name == "json_path" and not value:  # the default of the finetuning commands
            raise UserError("--data.json_path: must be given")
        if (
            name.endswith("_path")
            and name not in getattr(data, "takes_urls", ())  # checked when they are listed
            and value
        ):
            path = Path(value).expanduser()
            if glob.has_magic(str(value)) and not path.exists():
                if not glob.glob(str(path), recursive=True):
                    raise UserError(f"--data.{name} {value}: no file matches")
            elif not path.exists():
                raise UserError(f"--data.{name} {value}: no such file or folder")
            elif path.is_file() and not path.stat().st_size:
                raise UserError(f"--data.{name} {value}: is empty")
