"""`toolkit doctor`: report environment, topology, communication and gradients on rank 0."""

import io
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from tempfile import TemporaryDirectory

from lightning.fabric import Fabric

from toolkit.config import (
    AUTO,
    Accelerator,
    Auto,
    DDPArgs,
    EvalArgs,
    FSDPArgs,
    OptimizerArgs,
    Strategy,
    TrainArgs,
)
from toolkit.data.tokens.synthetic import SyntheticTokens
from toolkit.diagnostics import communication
from toolkit.diagnostics.comparison import compare
from toolkit.diagnostics.environment import (
    Sections,
    describe_environment,
    find_differences,
    find_problems,
    format_sections,
    nvidia_smi,
)
from toolkit.diagnostics.topology import find_slow_links, parse_topology
from toolkit.diagnostics.verify import LayoutCheck
from toolkit.distributed import ranks
from toolkit.distributed.device import count_devices, pick_accelerator
from toolkit.distributed.fabric import build_fabric
from toolkit.distributed.launch import Timeouts, launch_processes
from toolkit.distributed.strategy import plan_strategy
from toolkit.distributed.world import WorldInfo, detect_world
from toolkit.errors import PeerLostError, PeerShutdownError, UserError, mark_reported, require_option
from toolkit.models.block import Block
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.run_args import RunArgs
from toolkit.training.engine import start
from toolkit.training.short_run import short_run_args

_MAX_SKEW = 1.0  # seconds
_MAX_LISTED_RANKS = 64
_MODEL = "pico-llama"
_NCCL_HINT = "NCCL_DEBUG=INFO shows what NCCL does, NCCL_SOCKET_IFNAME selects its network (see troubleshooting: NCCL)"


@dataclass(frozen=True)
class DoctorOptions:
    """The options of the command, see :func:`toolkit.commands.doctor.setup`."""

    comm: bool
    check_grads: bool
    topology: bool
    strategy: Strategy
    accelerator: Accelerator
    devices: int | Auto
    num_nodes: int | Auto
    timeout: float | Auto
    out_dir: str

    @property
    def minutes(self) -> float:
        return 5.0 if self.timeout == AUTO else self.timeout

    def check(self, world: WorldInfo) -> None:
        if world.world_size == 1:
            for name, default in (("comm", False), ("check_grads", False), ("timeout", AUTO)):
                value = getattr(self, name)
                hint = "needs several processes; use --devices 2 or a launcher"
                require_option(value == default, name, str(value).lower(), hint)
        needless = self.strategy != "auto" and not self.check_grads
        require_option(not needless, "strategy", self.strategy, "has no effect without --check_grads")


def examine(options: DoctorOptions) -> None:
    """Print the report on rank 0. Every process calls this."""
    device = pick_accelerator(options.accelerator)
    world = detect_world(options.devices, options.num_nodes, count_devices(device))
    options.check(world)
    environment = describe_environment(options.out_dir)
    warnings = find_problems(environment)
    _print(world, format_sections(environment))
    if options.topology:
        warnings += _examine_topology(world)
    if world.world_size > 1:
        addresses: list[str] = []
        with _errors_with_addresses(addresses, world, device):
            with _connect(world, device, options.minutes) as fabric:
                addresses += ranks.all_gather_object(f"pid {os.getpid()} on {socket.gethostname()}")
                warnings += _examine_ranks(world, fabric, addresses, environment)
                if options.comm:
                    _examine_communication(world, fabric, addresses)
            if options.check_grads:
                _examine_gradients(world, device, options)
    lines = [f"  {warning}" for warning in warnings] or ["  none"]
    _print(world, "\n".join(["Warnings", *lines]))


# ---- processes


@contextmanager
def _connect(world: WorldInfo, device: str, minutes: float) -> Iterator[Fabric]:
    """Launch the processes and connect them, as a run does."""
    plan = plan_strategy(
        "ddp",
        FSDPArgs(),
        DDPArgs(),
        devices=world.devices,
        num_nodes=world.num_nodes,
        accelerator=device,
        precision="32-true",
    )
    fabric = build_fabric(
        plan, world, accelerator=device, precision="32-true", fsdp=FSDPArgs(), ddp=DDPArgs(), block_classes={Block}
    )
    with launch_processes(fabric, world, Timeouts.from_minutes(minutes)) as group:
        group.init_process_group()
        yield fabric


@contextmanager
def _errors_with_addresses(addresses: list[str], world: WorldInfo, device: str) -> Iterator[None]:
    """Add process addresses to messages about ranks. Use exit code 1 for every lost process."""
    try:
        yield
    except PeerShutdownError as error:
        error.exit_code = 1 if error.exit_code == UserError.exit_code else error.exit_code
        raise
    except (PeerLostError, UserError) as error:
        named = name_addresses(str(error), addresses, world)
        lost = PeerLostError(f"{named}; {_NCCL_HINT}" if device == "cuda" else named)
        mark_reported(lost)
        raise lost from error


def name_addresses(text: str, addresses: list[str], world: WorldInfo) -> str:
    """Append to ``text`` the host and pid of each rank it mentions, or the node if the rank never connected."""
    named = {int(n) for numbers in re.findall(r"\branks? (\d+(?:, \d+)*)", text) for n in numbers.split(", ")}

    def place(rank: int) -> str:
        node, process = divmod(rank, world.devices)
        return addresses[rank] if addresses else f"process {process} of node {node}"

    places = [f"rank {rank} is {place(rank)}" for rank in sorted(named)]
    before, aborting, _ = text.partition("; aborting")  # the rest is how to resume
    return "; ".join([f"{before}{aborting}", *places])


def _examine_ranks(world: WorldInfo, fabric: Fabric, addresses: list[str], environment: Sections) -> list[str]:
    """Print all ranks and the clock skew of other nodes; return warnings."""
    everywhere = ranks.all_gather_object(environment)
    devices = ranks.all_gather_object(str(fabric.device))
    places = [f"{address}, {device}" for address, device in zip(addresses, devices, strict=True)]
    shown = {f"rank {rank}": place for rank, place in list(enumerate(places))[:_MAX_LISTED_RANKS]}
    if len(places) > _MAX_LISTED_RANKS:
        shown["..."] = f"{len(places) - _MAX_LISTED_RANKS} more"
    skews = communication.measure_clock_skew([node * world.devices for node in range(1, world.num_nodes)])
    clocks = {f"clock of rank {rank}": f"{skew * 1e3:+.1f} ms from rank 0's" for rank, skew in skews.items()}
    _print(world, format_sections({"Processes": shown | clocks}))
    late = {rank: skew for rank, skew in skews.items() if abs(skew) > _MAX_SKEW}
    warnings = [f"the clock of rank {rank} ({addresses[rank]}) differs by {skew:+.1f} s" for rank, skew in late.items()]
    return find_differences(everywhere) + warnings


# ---- sections


def _examine_topology(world: WorldInfo) -> list[str]:
    """Print this node's ``nvidia-smi topo -m`` matrix; return warnings."""
    if world.global_rank != 0:
        return []
    text = nvidia_smi("topo", "-m")
    if text is None:
        _print(world, "Topology\n  nvidia-smi is missing or fails: no NVIDIA GPU or no driver")
        return []
    matrix = text.partition("\nLegend")[0].rstrip()
    _print(world, "\n".join(["Topology", *(f"  {line.expandtabs()}" for line in matrix.splitlines())]))
    try:
        return find_slow_links(parse_topology(text))
    except ValueError as error:
        return [f"nvidia-smi topo -m: {error}"]


def _examine_communication(world: WorldInfo, fabric: Fabric, addresses: list[str]) -> None:
    """Print bandwidth by size, and the slowest link."""
    backend = "nccl" if fabric.device.type == "cuda" else "gloo"
    _print(world, f"Communication ({backend}, {world.world_size} ranks, float32; busbw as in nccl-tests)")
    _print(world, f"  {'operation':14}{'size':>9}{'time':>12}{'algbw':>14}{'busbw':>14}")
    for measurement in communication.measure_collectives(fabric.device):
        size, seconds = communication.format_size(measurement.size), f"{measurement.seconds * 1e3:,.3f} ms"
        rates = "".join(f"{rate / 1e9:>9.3g} GB/s" for rate in (measurement.algbw, measurement.busbw))
        _print(world, f"  {measurement.operation:14}{size:>9}{seconds:>12}{rates}")
    links = communication.measure_ring(fabric.device)
    slowest, fastest = (choose(links, key=lambda link: link.bandwidth) for choose in (min, max))
    for name, link in (("slowest", slowest), ("fastest", fastest)):
        pair = f"rank {link.sender} ({addresses[link.sender]}) to rank {link.receiver} ({addresses[link.receiver]})"
        _print(world, f"  {name} link of the ring: {link.bandwidth / 1e9:.3g} GB/s, {pair}")
    _print(world, "  all values are correct")


def _examine_gradients(world: WorldInfo, device: str, options: DoctorOptions) -> None:
    """Train a small model for one step on all ranks and on one process; print each parameter's gradient norm."""
    check = LayoutCheck()
    with TemporaryDirectory(prefix="toolkit-") as folder, redirect_stdout(io.StringIO()):
        args = RunArgs(
            command="pretrain", model_name=_MODEL, data=SyntheticTokens(vocab_size=512), eval=EvalArgs(),
            train=TrainArgs(global_batch_size=4 * world.world_size, micro_batch_size=2, max_seq_length=64),
            optimizer=OptimizerArgs(), out_dir=folder, precision="32-true", accelerator=options.accelerator,
            devices=world.devices, num_nodes=world.num_nodes, timeout=options.minutes,
            strategy=options.strategy,
        )  # fmt: skip
        args = short_run_args(args, 1, folder)
        config = resolve_auto(args, DeviceSpec.of_this_machine(device, world.devices, world.num_nodes))
        if world.global_rank == 0:
            check.run_references(args, 1, config, quiet=True)
        start(config, world, [check], is_short=True)
    _print(world, f"Gradients of one step of {_MODEL}: {config.strategy}")
    if world.global_rank != 0:
        return
    (record,), (reference,) = check.records, check.reference
    width = max(map(len, record.gradients))
    print(f"  {'parameter':{width}}{'norm':>14}{'one process':>14}")
    for name, norm in record.gradients.items():
        print(f"  {name:{width}}{norm:>14.8f}{reference.gradients[name]:>14.8f}")
    largest = compare(record, reference).gradient
    copies = f"; the {world.world_size // config.strategy.shards} replicas are bit-equal"
    has_copies = config.strategy.shards < world.world_size
    print(f"  largest relative difference of a norm from one process: {largest:.1e}{copies if has_copies else ''}")


def _print(world: WorldInfo, text: str) -> None:
    if world.global_rank == 0:
        print(text, flush=True)
