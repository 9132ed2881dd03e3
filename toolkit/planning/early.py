"""Mistakes that show without torch, which takes seconds to import; resolving the run finds them again."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.remote.run import check_out_dir
from toolkit.checkpoints.remote.storage import Storage
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.config import AUTO
from toolkit.config.command import classes_of
from toolkit.data import DataModule
from toolkit.errors import UserError, require_bitsandbytes
from toolkit.models.families import DEFAULT_MODEL, get_config
from toolkit.models.lora_config import LoRAConfig
from toolkit.paths import is_url
from toolkit.planning.batch import plan_batch
from toolkit.planning.in_backward import check_in_backward
from toolkit.planning.limits import require_profiled_steps
from toolkit.ui.loggers import check_loggers


def check_early(command: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a command before torch is imported.

    Does nothing where a launcher started this process: others wait for its report, and rank 0 may have begun to write.

    Raises:
        UserError: an unknown model or logger, a missing package, folder or file, a used folder, an impossible batch.
    """
    if {"LOCAL_RANK", "RANK", "SLURM_PROCID"} & os.environ.keys() or arguments.get("model_name") == "list":
        return
    folder = arguments.get("checkpoint_dir") or arguments.get("initial_checkpoint_dir")
    may_differ = command in ("verify", "consolidate", "plan")  # these take other folders, too
    if folder is not None and not may_differ and not (command == "merge_lora" and is_url(folder)):
        find_checkpoint_dir(folder)
    if arguments.get("quantize") is not None and command != "plan":
        require_bitsandbytes(f"--quantize {arguments['quantize']}")
    if "train" not in arguments or command == "plan":
        return
    check_loggers(arguments["logger_name"], arguments["log"])
    if arguments["optimizer"].name == "AdamW8bit":
        require_bitsandbytes("--optimizer.name AdamW8bit")
    if folder is None:
        get_config(arguments["model_name"] or DEFAULT_MODEL).override(arguments["model_config"])
    if "lora_r" in arguments:
        LoRAConfig.from_options(arguments)
    _check_batch(arguments, command == "finetune_lora")
    if arguments["profile"] and arguments["resume"] is False:
        require_profiled_steps(arguments["profiler"], arguments["train"].max_steps)
    _check_files(arguments["data"])
    if command == "verify_parallel":
        return  # it writes nothing
    check_out_dir(arguments["out_dir"], arguments["staging_dir"])
    if is_url(arguments["resume"]):
        Storage(arguments["resume"], "--resume")  # is its package installed?
    if not is_url(arguments["out_dir"]) and arguments["resume"] is False and arguments["out_dir"]:
        resolve_resume(False, Path(arguments["out_dir"]))


def _check_batch(arguments: Mapping[str, Any], has_adapters: bool) -> None:
    train, devices, num_nodes = arguments["train"], arguments["devices"], arguments["num_nodes"]
    micro, nodes = (1 if value in (None, AUTO) else value for value in (train.micro_batch_size, num_nodes))
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
    for name, value in vars(data).items():
        if name == "json_path" and not value:  # the default of the finetuning commands
            raise UserError("--data.json_path: must be given")
        if (
            name.endswith("_path")
            and name not in getattr(data, "takes_urls", ())  # checked when they are listed
            and value
            and not glob.has_magic(str(value))
            and not Path(value).expanduser().exists()
        ):
            raise UserError(f"--data.{name} {value}: no such file or folder")
