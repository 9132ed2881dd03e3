"""Launch the processes of a run and prepare its data: what is known before a model is built."""

import sys
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric import Fabric

from toolkit.checkpoints.lock import require_unlocked
from toolkit.checkpoints.remote.access import open_remote_run
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.store import FINAL, newest
from toolkit.data.base import PreparedData
from toolkit.distributed.device import (
    count_devices,
    deterministic_algorithms,
    fp32_reductions,
    pick_accelerator,
)
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launchers import is_launched
from toolkit.distributed.run_group import Timeouts, launch_processes
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import count_of, notice
from toolkit.io.processes import count_cores
from toolkit.models.block import Block
from toolkit.planning.best_metric import BestMetric
from toolkit.planning.data import complete, prepare_data
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig, device_spec_of
from toolkit.planning.run_args import RunArgs
from toolkit.training.checkpoint_meta import uses_old_ends, uses_old_tokenizer
from toolkit.training.hyperparameters import keep_old_ends
from toolkit.training.resume_checkpoint import fetch_on_other_nodes, find_intact
from toolkit.training.start_state import (
    StartState,
    keep_fused_qkv,
    keep_micro_batch,
    prepare_start_state,
    read_progress,
)
from toolkit.ui.console import make_progress

if TYPE_CHECKING:
    from toolkit.checkpoints.remote.remote_run import RemoteRun


@dataclass(eq=False)
class Launch(StartState):
    """A run after process launch and data preparation.

    Args:
        launched_at: Start of the launch, which ``--train.max_time`` limits in addition to another limit, in seconds of
            time.perf_counter().
        remote: The run's remote folder; None without remote storage.
        is_short: Whether the run saves no checkpoints and writes no metrics.
    """

    config: ResolvedConfig
    world: WorldInfo
    launched_at: float
    remote: "RemoteRun | None"
    display: Any
    fabric: Fabric
    data: PreparedData
    is_short: bool

    @property
    def args(self) -> RunArgs:
        return self.config.args

    @property
    def out_dir(self) -> Path:
        return self.args.run_dir

    @property
    def place(self) -> Path | str:
        """The run's folder or URL, for messages."""
        return self.out_dir if self.remote is None else self.remote.url

    def address(self, folder: Path) -> Path | str:
        """Return where a checkpoint is found, for messages: on the storage, if this machine has only a part of it."""
        return folder if folder.parent == self.out_dir else f"{self.place}/{folder.name}"

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts.from_minutes(self.args.timeout)

    @property
    def is_finished(self) -> bool:
        """Whether a limit or early stopping is reached and ``final/`` is written."""
        progress, patience = self.progress, self.args.train.patience
        stopping = self.saved_callback_states.get("EarlyStopping", {})
        is_stopped_early = (
            patience is not None
            and stopping.get("stale_validations", 0) >= patience
            and BestMetric.from_options(self.args.eval, self.args.objective).is_of(stopping)
        )
        is_at_end = self.limits.reached(progress.step, progress.tokens, progress.seconds)
        return (is_at_end or is_stopped_early) and self.resume_from == self.out_dir / FINAL


def launch_run(config: ResolvedConfig, world: WorldInfo, stack: ExitStack, is_short: bool = False) -> Launch:
    """Launch the processes, prepare the data, and agree on the checkpoint to resume from."""
    launched_at, args, out_dir = time.perf_counter(), config.args, config.args.run_dir
    json_file = sys.stdout if args.log.format == "json" else None
    if json_file is not None:
        stack.enter_context(redirect_stdout(sys.stderr))  # of everything that is not JSON
    remote = open_remote_run(args.out_dir, out_dir)
    strategy, precision, accelerator = config.strategy, config.precision, args.accelerator
    if is_alone(config):
        strategy, precision, accelerator = replace(strategy, kind="single"), "32-true", "cpu"
    if config.device == "cpu" and world.starts_processes and world.devices > (cores := count_cores()):
        notice(f"note: --devices {world.devices} starts {world.devices} processes on {count_of(cores, 'CPU core')}")
    fabric = build_fabric(
        strategy,
        world,
        accelerator=pick_accelerator(accelerator),
        precision=precision,
        fsdp=config.fsdp,
        ddp=args.ddp,
        block_classes=set(args.block_classes or (Block,)),
        groups=args.groups,
    )
    group = stack.enter_context(launch_processes(fabric, world, Timeouts.from_minutes(args.timeout)))
    if is_short:
        group.shutdown.resume_hint = lambda: "Start the command again"
    else:
        saved = "the newest checkpoint, if one was saved"
        group.shutdown.resume_hint = lambda: f"--resume auto continues from {newest(out_dir) or saved}"
    stack.enter_context(deterministic_algorithms(args.deterministic))
    stack.enter_context(fp32_reductions())
    display: Any = stack.enter_context(make_progress(world.global_rank == 0, json_file))
    resume_from = None
    if world.global_rank == 0:
        require_unlocked(out_dir)
        if remote is not None:
            remote.prepare(args.resume, display.message, keep_best=args.train.keep_best, verify=args.verify_checkpoint)
        resume_from = resolve_resume(args.resume, out_dir)
    if group.decide_on_rank0(lambda: uses_old_ends(resume_from)):
        keep_old_ends(args.data)
    old_tokenizer = group.decide_on_rank0(lambda: uses_old_tokenizer(args.tokenizer_dir, resume_from), "tokenizer")
    display.phase("preparing data")
    data = group.prepare_in_turns(lambda: prepare_data(args, config.max_seq_length, display.message, old_tokenizer))
    group.init_process_group()
    fetch_on_other_nodes(remote, args.resume, resume_from, world)
    resume_from, damaged = find_intact(args, resume_from, world.local_rank == 0, display)
    progress = read_progress(resume_from)
    config = keep_fused_qkv(complete(keep_micro_batch(config, resume_from), data, progress), resume_from)
    if config.length:
        display.message(f"Length: {config.length}; the lines of steps show the time left")
    state = prepare_start_state(config, data, progress, resume_from, damaged)
    return Launch(
        **vars(state), config=config, world=world, launched_at=launched_at, remote=remote, display=display,
        fabric=fabric, data=data, is_short=is_short,
    )  # fmt: skip


def is_alone(config: ResolvedConfig) -> bool:
    """Whether one process stands for all: a dry run of several devices, which need not be on this machine."""
    return config.args.dry_run and config.devices.world_size > 1


def detect_devices(args: RunArgs) -> tuple[DeviceSpec, WorldInfo]:
    """Return the run's devices and the processes to start.

    A dry run starts none and waits for none. Without a launcher, several devices are those that ``toolkit plan``
    assumes; with one, the process keeps its rank, as only the first prints.
    """
    alone = WorldInfo(1, 1, 0, 0, "toolkit", starts_processes=False)
    if args.dry_run and not is_launched() and (assumed := device_spec_of(args)).world_size > 1:
        return assumed, alone
    device = pick_accelerator(args.accelerator)
    world = detect_world(args.devices, args.num_nodes, count_devices(device))
    devices = DeviceSpec.of_this_machine(device, world.devices, world.num_nodes)
    if args.dry_run and world.world_size > 1:
        return devices, replace(alone, node_rank=world.global_rank)
    return devices, world
