"""`toolkit doctor`: report environment, topology, communication and gradients on rank 0."""

import io
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from lightning.fabric import Fabric

from toolkit.config import AUTO, Accelerator, Auto, DDPArgs, EvalArgs, FSDPArgs, OptimizerArgs, Strategy, TrainArgs
from toolkit.data.tokens.synthetic import SyntheticTokens
from toolkit.distributed import ranks
from toolkit.distributed.device import count_devices, pick_accelerator
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launchers import read_variables
from toolkit.distributed.mesh import Layout
from toolkit.distributed.run_group import Timeouts, launch_processes
from toolkit.distributed.strategy import StrategyPlan
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import PeerLostError, PeerShutdownError, UserError, mark_reported, require_option
from toolkit.models.block import Block
from toolkit.planning.run_args import RunArgs
from toolkit_doctor import communication
from toolkit_doctor.environment import (
    Sections,
    describe_environment,
    find_differences,
    find_problems,
    format_sections,
    nvidia_smi,
)
from toolkit_doctor.topology import find_slow_links, parse_topology
from toolkit_doctor.verify import check_layout

_MAX_SKEW = 1.0  # seconds
_MAX_LISTED_RANKS = 64
_MODEL = "pico-llama"
_NCCL_HINT = "NCCL_DEBUG=INFO shows what NCCL does, NCCL_SOCKET_IFNAME selects its network (see troubleshooting: NCCL)"


def examine(
    *,
    comm: bool,
    check_grads: bool,
    topology: bool,
    strategy: Strategy,
    accelerator: Accelerator,
    devices: int | Auto,
    num_nodes: int | Auto,
    timeout: float | Auto,
    out_dir: str,
) -> None:
    """Print the report on rank 0. Every process calls this. The options are those of the command."""
    device = pick_accelerator(accelerator)
    world = detect_world(devices, num_nodes, count_devices(device))
    if world.world_size == 1:
        hint = "needs several processes; use --devices 2 or a launcher"
        require_option(not comm, "comm", "true", hint)
        require_option(not check_grads, "check_grads", "true", hint)
        require_option(timeout == AUTO, "timeout", timeout, hint)
    has_effect = check_grads or strategy == "auto"
    require_option(has_effect, "strategy", strategy, "has no effect without --check_grads")
    minutes = 5.0 if timeout == AUTO else timeout
    place = f"rank {world.global_rank} of {world.world_size}; node {world.node_rank} of {world.num_nodes}"
    launcher = {"started by": world.launcher, "this process": place} | read_variables(world.launcher)
    environment = {"Launcher": launcher} | describe_environment(out_dir)
    warnings = find_problems(environment)
    _print(world, format_sections(environment))
    if topology:
        warnings += _examine_topology(world)
    if world.world_size > 1:
        addresses: list[str] = []
        with _errors_with_addresses(addresses, world, device):
            plan = StrategyPlan("ddp", None, Layout(replicate=world.world_size), "")
            fabric = build_fabric(
                plan, world, accelerator=device, precision="32-true", fsdp=FSDPArgs(), ddp=DDPArgs(),
                block_classes={Block},
            )  # fmt: skip
            with launch_processes(fabric, world, Timeouts.from_minutes(minutes)) as group:  # as a run does
                group.init_process_group()
                addresses += ranks.all_gather_object(f"pid {os.getpid()} on {socket.gethostname()}")
                warnings += _examine_ranks(world, fabric, addresses, environment)
                if comm:
                    _examine_communication(world, fabric, addresses)
            if check_grads:
                _examine_gradients(world, accelerator, strategy, minutes)
    _print(world, "\n  ".join(["Warnings", *(warnings or ["none"])]))


# ---- processes


@contextmanager
def _errors_with_addresses(addresses: list[str], world: WorldInfo, device: str) -> Iterator[None]:
    """Add process addresses to messages about ranks. Use exit code 1 for every lost process."""
    try:
        yield
    except PeerShutdownError as error:
        error.exit_code = 1 if error.exit_code == UserError.exit_code else error.exit_code
        raise
    except (PeerLostError, UserError) as error:
        # the host and pid of each rank that the message names, or the node if the rank never connected
        lists = re.findall(r"\branks? (\d+(?:, \d+)*)", str(error))
        mentioned = sorted({int(number) for text in lists for number in text.split(", ")})
        n = world.devices
        places = addresses or [f"process {rank % n} of node {rank // n}" for rank in range(world.world_size)]
        before, aborting, _ = str(error).partition("; aborting")  # the rest is how to resume
        named = "; ".join([f"{before}{aborting}", *(f"rank {rank} is {places[rank]}" for rank in mentioned)])
        lost = PeerLostError(f"{named}; {_NCCL_HINT}" if device == "cuda" else named)
        mark_reported(lost)
        raise lost from error


def _examine_ranks(world: WorldInfo, fabric: Fabric, addresses: list[str], environment: Sections) -> list[str]:
    """Print all ranks and the clock skew of other nodes; return warnings."""
    everywhere, skews = ranks.all_gather_object(environment), communication.measure_clock_skew()
    devices = ranks.all_gather_object(str(fabric.device))
    places = [f"{address}, {device}" for address, device in zip(addresses, devices, strict=True)]
    shown = {f"rank {rank}": place for rank, place in enumerate(places[:_MAX_LISTED_RANKS])}
    if len(places) > _MAX_LISTED_RANKS:
        shown["..."] = f"{len(places) - _MAX_LISTED_RANKS} more"
    warnings = find_differences(everywhere)
    for rank in range(world.devices, world.world_size, world.devices):  # the first of each other node
        shown[f"clock of rank {rank}"] = f"{skews[rank] * 1e3:+.1f} ms from rank 0's"
        if abs(skews[rank]) > _MAX_SKEW:
            warnings.append(f"the clock of rank {rank} ({addresses[rank]}) differs by {skews[rank]:+.1f} s")
    _print(world, format_sections({"Processes": shown}))
    return warnings


# ---- sections


def _examine_topology(world: WorldInfo) -> list[str]:
    """Print this node's ``nvidia-smi topo -m`` matrix; return warnings."""
    if world.global_rank != 0:
        return []
    text = nvidia_smi("topo", "-m") or "nvidia-smi is missing or fails: no NVIDIA GPU or no driver"
    matrix = text.partition("\nLegend")[0].rstrip().expandtabs()
    _print(world, "\n  ".join(["Topology", *matrix.splitlines()]))
    try:
        return find_slow_links(parse_topology(text)) if "\n" in text else []
    except ValueError as error:
        return [f"nvidia-smi topo -m: {error}"]


def _examine_communication(world: WorldInfo, fabric: Fabric, addresses: list[str]) -> None:
    """Print bandwidth by size, and the slowest link."""
    backend = "nccl" if fabric.device.type == "cuda" else "gloo"
    _print(world, f"Communication ({backend}, {world.world_size} ranks, float32; busbw as in nccl-tests)")
    _print(world, f"  {'operation':14}{'size':>9}{'time':>12}{'algbw':>14}{'busbw':>14}")
    for name, size, seconds, algbw, busbw in communication.measure_collectives(fabric.device):
        where = f"  {name:14}{communication.format_size(size):>9}"
        _print(world, f"{where}{seconds * 1e3:>9,.3f} ms{algbw / 1e9:>9.3g} GB/s{busbw / 1e9:>9.3g} GB/s")
    links = communication.measure_ring(fabric.device)
    for name, choose in (("slowest", min), ("fastest", max)):
        bandwidth, sender = choose((bandwidth, rank) for rank, bandwidth in enumerate(links))
        receiver = (sender + 1) % world.world_size
        pair = f"rank {sender} ({addresses[sender]}) to rank {receiver} ({addresses[receiver]})"
        _print(world, f"  {name} link of the ring: {bandwidth / 1e9:.3g} GB/s, {pair}")
    _print(world, "  all values are correct")


def _examine_gradients(world: WorldInfo, accelerator: Accelerator, strategy: Strategy, minutes: float) -> None:
    """Train a small model for one step on all ranks and on one process; print how far their gradients differ."""
    with redirect_stdout(io.StringIO()):
        args = RunArgs(
            command="pretrain", model_name=_MODEL, data=SyntheticTokens(vocab_size=512), eval=EvalArgs(),
            train=TrainArgs(global_batch_size=4 * world.world_size, micro_batch_size=2, max_seq_length=64),
            optimizer=OptimizerArgs(), out_dir="", precision="32-true", accelerator=accelerator,
            devices=world.devices, num_nodes=world.num_nodes, timeout=minutes, strategy=strategy,
        )  # fmt: skip
        config, check = check_layout(args, 1, pick_accelerator(accelerator), world, quiet=True)
    _print(world, f"Gradients of one step of {_MODEL}: {config.strategy}")
    if world.global_rank != 0:
        return
    (difference,) = check.differences
    replicas = world.world_size // config.strategy.shards
    copies = f"; the {replicas} replicas are bit-equal" if replicas > 1 else ""
    print(f"  {len(check.records[0].gradients)} parameters; largest relative difference of a norm from one process: "
          f"{difference.gradient:.1e}, of {difference.parameter}{copies}")  # fmt: skip


def _print(world: WorldInfo, text: str) -> None:
    if world.global_rank == 0:
        print(text, flush=True)
