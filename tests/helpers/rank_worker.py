"""One rank of a group of gloo processes that executes many runs, each through the command line; see groups.py.

The cases are a JSON file: {"name", "flags", "nodes", "fault", "look_at"}. The results of this rank are written next to
it, as ``RANK-name.json``: the exit code and the values that :func:`watch` records.
"""

import copy
import errno
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial, partialmethod
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from toolkit_doctor import communication, single_process
from toolkit_doctor.gradients import GradientRecorder
from torch import distributed as dist
from torch._dynamo.utils import counters
from torch.autograd import profiler_legacy
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from helpers.faulty_callbacks import skew_gradient
from helpers.peak_memory import rise
from helpers.slow_writes import slow_disk, writes_that_last
from helpers.surroundings import freeze_objects, set_cpu, short_outputs
from toolkit import cli, extension
from toolkit.checkpoints.run import sharded, state_dicts
from toolkit.checkpoints.run.state_dicts import full_state
from toolkit.distributed import fsdp, ranks, strategy
from toolkit.distributed.model_parts import cuts_of
from toolkit.distributed.shards import shard_of, sharded_values
from toolkit.errors import GuardError
from toolkit.models import aligned
from toolkit.models.mlp import LLaMAMLP
from toolkit.planning import resolve
from toolkit.private_torch import local_shard
from toolkit.training import build, checkpointer, data_reader, engine, launched_step, model_spec
from toolkit.training.callbacks.replicas import ReplicaCheck
from toolkit.training.model_spec import unwrapped

set_cpu()
freeze_objects()  # in the fork server, for the forked processes

# instead of a process that imports torch: the server that has forked this one forks another
FORKED = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))


def local_bytes(module, optimizer, what) -> int:
    if what == "parameters":
        tensors = list(module.parameters())
    elif what == "gradients":
        tensors = [p.grad for p in module.parameters() if p.grad is not None]
        tensors += waiting_gradients(module)
    else:
        tensors = [
            t
            for state in optimizer.state.values()
            for k, t in state.items()
            if isinstance(t, torch.Tensor) and k != "step"
        ]
    return sum(t.numel() * t.element_size() for t in map(local_shard, tensors))


def waiting_gradients(module) -> list[torch.Tensor]:
    """Return unsharded gradients that FSDP holds between micro-batches, in addition to the parameters' gradients."""
    if isinstance(module, FSDPModule):
        groups = [m._get_fsdp_state()._fsdp_param_group for m in module.modules() if isinstance(m, FSDPModule)]
        groups = [group for group in groups if group is not None]  # the root may have no sharded parameter
        parts = [part for group in groups for part in group.fsdp_params]
        held = [part.unsharded_accumulated_grad for part in parts]
        held += [part.unsharded_param.grad for part in parts if hasattr(part, "_unsharded_param")]
        held += [part.sharded_param.grad for part in parts]  # the root is gathered by now
        held += [group._partial_reduce_output for group in groups]  # of HYBRID_SHARD
        shown = {id(p.grad) for p in module.parameters()}
        return [gradient for gradient in held if gradient is not None and id(gradient) not in shown]
    return []


def watch(seen: dict, fit):
    """Wrap the loop and record initial weights and the bytes in use in the middle of a step."""

    def watched(training):
        run = training.run
        module, optimizer = unwrapped(run.model), run.checkpointer.optimizer
        weights, _ = full_state(module, optimizer, run.spec.tied)
        waiting = [0]
        module.register_forward_pre_hook(lambda *_: waiting.append(local_bytes(module, optimizer, "gradients")))
        seen["initial"] = {name: [float(w.double().sum()), float(w.double().norm())] for name, w in weights.items()}
        optimizer.register_step_pre_hook(
            lambda *_: seen.update({what: local_bytes(module, optimizer, what) for what in ("parameters", "gradients")})
        )
        optimizer.register_step_post_hook(lambda *_: seen.update(moments=local_bytes(module, optimizer, "moments")))
        seen["copied"] = 0
        copies = run.checkpointer._copies
        if copies is not None:
            copy = copies.copy

            def counting_copy(value, name):
                copied = copy(value, name)
                if isinstance(copied, torch.Tensor):
                    seen["copied"] += copied.nbytes
                return copied

            copies.copy = counting_copy
        seen["unread"], launch = 0, training._launch

        def launch_and_count(*args):
            step = launch(*args)
            seen["unread"] = max(seen["unread"], len(training.unread))
            return step

        training._launch = launch_and_count
        seen["options"] = options_of(module)
        seen["dtypes"] = sorted({str(p.dtype) for p in module.parameters()})
        fit(training)
        seen["waiting"] = max(waiting)  # between the micro-batches

    return watched


def measuring(seen: dict, build_model):
    """Record the increase of this process's anonymous memory, in MiB, while the model is initialized."""

    def measured(*args, **options):
        peak, after, model = rise(build_model, *args, **options)
        seen["model_mb"] = {"peak": peak / 2**20, "after": after / 2**20}
        return model

    return measured


def options_of(module) -> dict:
    """Return the user's options as the wrapper has them."""
    if isinstance(module, FSDPModule):
        _, *units = [part for part in module.modules() if isinstance(part, FSDPModule)]
        policies = {type(part).__name__: part._get_fsdp_state()._mp_policy for part in (*units, module)}
        dtypes = {name: [str(policy.param_dtype), str(policy.reduce_dtype)] for name, policy in policies.items()}
        names = {part: name for name, part in module.named_modules() if isinstance(part, FSDPModule)}
        prefetched = {
            kind: {
                name: [names[unit] for state in lists for unit in state._modules]
                for part, name in names.items()
                if (lists := getattr(part._get_fsdp_state(), f"_states_to_{kind}_prefetch"))
            }
            for kind in ("forward", "backward")
        }
        classes = [type(unit).__name__.removeprefix("FSDP") for unit in units]
        return {"units": classes, "dtypes": dtypes, "prefetched": prefetched}
    if isinstance(module, DistributedDataParallel):
        return {
            "bucket_bytes": module.bucket_bytes_cap, "bucket_view": module.gradient_as_bucket_view,
            "find_unused": module.find_unused_parameters, "static": module.static_graph,
        }  # fmt: skip
    return {}


def counting(seen: dict, launch_step):
    """Count the collectives of the third step in a trace of the older profiler: torch.profiler takes 2 s to start."""
    steps = iter(range(10**9))

    def counted(*args, **options):
        if next(steps) != 2:
            return launch_step(*args, **options)
        torch.autograd._enable_profiler_legacy(profiler_legacy.profile().config())
        result = launch_step(*args, **options)
        records = chain.from_iterable(torch.autograd._disable_profiler_legacy())
        names = Counter(record.name() for record in records if record.kind() == "push")
        own = ("gloo:", "toolkit::gather", "toolkit::scatter")
        seen["collectives"] = {name: n for name, n in names.items() if name.startswith(own)}
        return result

    return counted


def recording_gradients(file: Path, launch_step):
    """Write the unsharded gradients of the first step to ``file``."""

    def record(module) -> None:
        whole, cuts, gradients = StateDictOptions(full_state_dict=True), cuts_of(module), {}
        for name, p in module.named_parameters():
            if (gradient := shard_of(p).grad) is not None:
                (gradient,) = sharded_values({"": gradient}, p).values()
                gradients[name] = state_dicts._gather(gradient, whole, cuts.get(name)).clone()
        if ranks.layout().pipeline > 1:
            gradients = state_dicts.gather_stages(gradients)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(gradients, file)

    def recorded(objective, update, *arguments):
        module, is_first = unwrapped(update.model), not file.exists()
        if is_first:
            hook = update.optimizer.optimizer.register_step_pre_hook(lambda *_: record(module))
        result = launch_step(objective, update, *arguments)
        if is_first:
            hook.remove()
        return result

    return recorded


def counting_graphs(seen: dict, launch_step):
    """Count the compiled graphs after each step."""
    counters["stats"].clear()

    def counted(*args, **options):
        result = launch_step(*args, **options)
        seen.setdefault("graphs", []).append(counters["stats"]["unique_graphs"])
        return result

    return counted


def hybrid_mesh(device: str):
    return init_device_mesh(device, (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))


def broken(kind: str):
    """Inject a fault."""
    if kind == "mesh":  # shard groups of one rank without replicas
        return mock.patch.object(fsdp, "data_mesh", lambda layout, device: hybrid_mesh(device)["shard"])
    if kind == "norms":  # gradients of replicated parameters are never reduced
        return mock.patch.object(fsdp.FullyShardedStrategy, "_complete_gradients", lambda self, module: None)
    if kind == "norms that differ":  # between the replicas of HYBRID_SHARD, by more than rounding
        norm = fsdp.FullyShardedStrategy._norm_of_replica

        def skewed(self, module):
            return norm(self, module) * (1 + 0.1 * (dist.get_rank() // 2))

        return mock.patch.object(fsdp.FullyShardedStrategy, "_norm_of_replica", skewed)
    if kind == "16-mixed on a CPU":  # no fault: GPUs without bfloat16 use it
        return mock.patch.object(resolve, "pick_precision", lambda *args: "16-mixed")
    if kind == "compile with the eager backend":  # no fault: dynamo without the compile time
        return mock.patch.object(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    if kind == "padding on a CPU":  # no fault: matmuls are padded as on CUDA
        return mock.patch.object(aligned, "needs_alignment", lambda device, dtype: True)
    if kind == "offload on a CPU":  # no fault: the code of offloaded shards, without pinned memory and streams
        stack = ExitStack()
        stack.enter_context(mock.patch.object(strategy, "OFFLOADING", ("cpu",)))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda self: self))
        stack.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", lambda self: None, create=True))
        return stack
    if kind == "fp8 all-gathers on a CPU":  # no fault: gloo has no fp8, so it gathers bytes
        gather = dist.all_gather_single

        def gather_bytes(output_tensor, input_tensor, **options):
            tensors = output_tensor, input_tensor
            return gather(*(t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors), **options)

        stack = ExitStack()
        stack.enter_context(mock.patch.object(dist, "all_gather_single", gather_bytes))
        gather_in_fp8 = partial(model_spec.gather_in_fp8, device="cpu")
        stack.enter_context(mock.patch.object(model_spec, "gather_in_fp8", gather_in_fp8))
        return stack
    if kind.startswith("late"):  # no fault: as on CUDA, the host reads a step's result when the next one is launched
        stack = ExitStack()
        stack.enter_context(mock.patch.object(launched_step, "LATE_ON", {"cpu"}))
        stack.enter_context(broken(kind.removeprefix("late, ")) if kind != "late" else nullcontext())
        return stack
    if kind == "weights of the MLPs are not used":
        return mock.patch.object(LLaMAMLP, "forward", lambda self, x: x)
    if kind == "no permission on rank 1":
        return mock.patch.object(sharded._Writer, "write_data", forbidden(sharded._Writer.write_data))
    if kind == "slow writes":  # no fault: checkpoints are written two steps late
        return writes_that_last(2)
    if kind.startswith("slow disk on rank "):  # no fault, either
        return slow_disk(int(kind[-1]))
    if kind == "inf in a moment on rank 1":
        return mock.patch.object(engine, "launch_step", with_inf(engine.launch_step))
    if kind == "the search for NaN fails on rank 1":
        return mock.patch.object(checkpointer, "nonfinite_state", failing_search)
    if kind == "slow data on rank 1":
        return slow_loading(data_reader.DataReader.read)
    if kind == "nan on rank 1":
        return mock.patch.object(engine, "launch_step", with_nan(engine.launch_step))
    if kind in ("by a callback", "by the data"):
        return nullcontext()
    if kind == "a callback on rank 1":  # no fault: it looks at the gradients
        looks = mock.patch.object(ReplicaCheck, "on_before_optimizer_step", lambda self, trainer: None)
        return looks if os.environ["LOCAL_RANK"] == "1" else nullcontext()
    if kind == "wrong values from rank 1":
        values = communication._values
        wrong = lambda count, rank, device: values(count, rank, device) + (rank == dist.get_rank() == 1)  # noqa: E731
        return mock.patch.object(communication, "_values", wrong)
    if kind == "gradient on rank 1":
        return mock.patch.object(GradientRecorder, "on_before_optimizer_step", skewed_gradient)
    raise ValueError(kind)


def failing_search(module, optimizer):
    """Find nothing, except on rank 1, where the search itself fails."""
    if dist.get_rank() == 1:
        raise RuntimeError("no memory for the search")
    return []


RECORD = GradientRecorder.on_before_optimizer_step


def skewed_gradient(self, trainer):
    skew_gradient(trainer)
    RECORD(self, trainer)


def forbidden(write_data):
    """Deny rank 1 write permission."""

    def write(self, *args, **options):
        if dist.get_rank() == 1:
            raise PermissionError(errno.EACCES, "Permission denied", str(self.path))
        return write_data(self, *args, **options)

    return write


def with_inf(launch_step):
    """Make an optimizer state of rank 1 non-finite after the third step; the loss stays finite."""
    steps = iter(range(10**9))

    def step(objective, update, *arguments):
        optimizer = update.optimizer
        result = launch_step(objective, update, *arguments)
        if next(steps) == 2 and dist.get_rank() == 1:
            state = next(s for s in optimizer.state.values() if s["exp_avg_sq"].numel())
            state["exp_avg_sq"].view(-1)[0] = float("inf")
        return result

    return step


def slow_loading(read):
    """Give the engine a clock that rank 1 sets 100 s ahead while it waits for data."""
    ahead = 0

    def read_slowly(reader):
        nonlocal ahead
        ahead += 100 * dist.get_rank()
        return read(reader)

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead)
    stack = ExitStack()
    stack.enter_context(mock.patch.object(data_reader.DataReader, "read", read_slowly))
    stack.enter_context(mock.patch.object(engine, "time", clock))
    return stack


def with_nan(launch_step):
    """Make rank 1's third loss non-finite; that step must leave weights and optimizer state alone on every rank."""
    steps = iter(range(10**9))

    def step(objective, update, *arguments):
        model, optimizer = update.model, update.optimizer
        if next(steps) == 2 and dist.get_rank() == 1:
            unwrapped(model).register_forward_hook(lambda module, inputs, out: (out[0] * float("nan"), out[1]))
        before = copy.deepcopy([list(map(shard_of, model.parameters())), list(optimizer.state.values())])
        result = launch_step(objective, update, *arguments)

        def read():
            try:
                return result()
            except GuardError:
                after = [list(map(shard_of, model.parameters())), list(optimizer.state.values())]
                torch.testing.assert_close(after, before, rtol=0, atol=0)
                raise

        return read

    return step


def live(
    rank: int, size: int, port: int, cases: Path, environ: dict[str, str], installed: Callable = extension._installed
) -> None:
    """Run the cases as one rank of the group. ``installed`` returns the installed extensions."""
    os.environ.clear()
    os.environ |= environ
    extension._installed = installed
    with open(cases.parent / f"{rank}.out", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        per_node = size // case["nodes"]
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank % per_node),
            "NODE_RANK": str(rank // per_node), "LOCAL_WORLD_SIZE": str(per_node),
        }  # fmt: skip
        seen: dict = {}
        look_at = case["look_at"].split()
        layout = ["--devices", str(per_node), "--num_nodes", str(case["nodes"])]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(engine.Engine, "train", watch(seen, engine.Engine.train)))
            stack.enter_context(mock.patch.object(single_process, "multiprocessing", FORKED))
            stack.enter_context(short_outputs())
            if "memory" in look_at:
                stack.enter_context(mock.patch.object(build, "build_model", measuring(seen, build.build_model)))
            if "collectives" in look_at:
                stack.enter_context(mock.patch.object(engine, "launch_step", counting(seen, engine.launch_step)))
            if "gradients" in look_at:
                file = cases.parent.parent / f"{case['name']}.gradients"
                step = recording_gradients(file, engine.launch_step)
                stack.enter_context(mock.patch.object(engine, "launch_step", step))
            if "graphs" in look_at:
                stack.enter_context(mock.patch.object(engine, "launch_step", counting_graphs(seen, engine.launch_step)))
            if case["fault"]:
                stack.enter_context(broken(case["fault"]))
            seen["exit"] = cli.main([*case["command"].split(), *layout, *case["flags"]])
        (cases.parent / f"{rank}-{case['name']}.json").write_text(json.dumps(seen))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.2)  # otherwise gloo's threads may free tensors during interpreter exit


if __name__ == "__main__":
    live(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), dict(os.environ))
