"""`toolkit verify_parallel`: compare the first steps of a run on its layout and on one process."""

from __future__ import annotations

from tempfile import TemporaryDirectory

from toolkit.distributed import ranks
from toolkit.distributed.device import device_memory
from toolkit.distributed.world import WorldInfo
from toolkit.errors import DifferenceError, UserError, require_option
from toolkit.extension import load_single
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.engine import start
from toolkit.training.launch import detect_devices
from toolkit.training.run import Run
from toolkit_doctor.comparison import Difference, choose_splits, choose_tolerance, compare
from toolkit_doctor.gradients import GradientRecorder, StepRecord
from toolkit_doctor.short_run import short_run_args, single_process_args
from toolkit_doctor.single_process import run_single_process

_NAMES = ("the loss", "the gradient norm", "a parameter's gradient", "the logged gradient norm")
"""Words for the numbers of a :class:`Difference`, in its order."""
_HEADER = (
    " step         loss  one process   difference    grad norm  one process   difference    gradients"  # of format_step
)


def verify_parallel(args: RunArgs, steps: int) -> None:
    """Compare the first steps of a run with the same steps on one process. Every process of the run calls this.

    Rank 0 first trains on one process while the other ranks wait.
    """
    devices, world = detect_devices(args)
    if world.world_size == 1:
        raise UserError(
            f"--devices {args.devices}: a single process has nothing to compare; use 2 or more, or torchrun"
        )
    size = args.pipeline_parallel_size
    hint = "verify_parallel compares gradients of complete models; use 1"
    require_option(size == 1, "pipeline_parallel_size", size, hint)
    check_layout(args, steps, devices.device, world)


def check_layout(
    args: RunArgs, steps: int, device: str, world: WorldInfo, quiet: bool = False
) -> tuple[ResolvedConfig, LayoutCheck]:
    """Do what :func:`verify_parallel` says. With ``quiet`` the child process prints nothing.

    Raises:
        DifferenceError: The steps differ.
    """
    with TemporaryDirectory(prefix="toolkit-") as folder:
        trial = short_run_args(args, steps, folder)
        config = resolve_auto(trial, DeviceSpec.of_this_machine(device, world.devices, world.num_nodes))
        callbacks, check = load_callbacks(args.callbacks), LayoutCheck()
        if world.global_rank == 0:
            require_memory_of_one_process(config.args, device)
            print(f"Comparing {steps} steps of {args.command}, {config.precision}, {config.batch}", flush=True)
            if args.resume:
                print(f"note: --resume {args.resume} is ignored: the comparison starts at step 1", flush=True)
            print("One process:", flush=True)
            batch, splits = config.batch, []
            check.reference = run_single_process(args, steps, device, batch.micro_batch_size, quiet)
            # in 16 bits, other micro-batch sizes show how much rounding to tolerate
            sizes = choose_splits(batch.global_batch_size, batch.micro_batch_size)
            for size in sizes if config.precision != "32-true" else ():
                print(f"One process, micro batch {size}, for the tolerance of {config.precision}", flush=True)
                splits.append(run_single_process(args, steps, device, size, quiet=True))
            check.tolerance = choose_tolerance(check.reference, splits)
            print(f"On {world.world_size} ranks:", flush=True)
        start(config, world, [*callbacks, check], is_short=True)
    return config, check


class LayoutCheck(GradientRecorder):
    """Prints each step next to its single-process reference on rank 0, and raises an error if they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.reference: list[StepRecord] = []  # on rank 0
        self.tolerance: Difference | None = None
        self.differences: list[Difference] = []

    def on_step_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, metrics)
        if len(self.records) <= len(self.reference):
            record, reference = self.records[-1], self.reference[len(self.records) - 1]
            difference = compare(record, reference)
            if not self.differences:
                trainer.display.message(_HEADER)
            self.differences.append(difference)
            trainer.display.message(format_step(trainer.progress.step, record, reference, difference))

    def on_train_end(self, trainer: Run) -> None:
        failure = ""
        if self.tolerance is not None and not (failure := find_failure(self.differences, self.tolerance)):
            largest = [max(values) for values in list(zip(*self.differences, strict=True))[:3]]
            texts = [
                f"{value:.1e} in {name} (tolerance {limit:.1e})"
                for value, name, limit in zip(largest, _NAMES, self.tolerance, strict=False)
            ]
            trainer.display.message(
                f"passed: {len(self.differences)} steps on {ranks.world_size()} ranks equal those on one process, "
                f"within {', '.join(texts)}"
            )
        if failure := ranks.broadcast_from_rank0(failure):
            raise DifferenceError(failure)


def find_failure(differences: list[Difference], tolerance: Difference) -> str:
    """Describe the first step whose difference exceeds the tolerance; empty if there is none."""
    for step, difference in enumerate(differences, 1):
        texts = [
            f"{name} by {value:.1e} (tolerance {limit:.1e})"
            for name, value, limit in zip(_NAMES, difference[:4], tolerance[:4], strict=True)
            if not value <= limit  # NaN exceeds
        ]
        if texts:
            return (
                f"step {step}: differs from one process in {', '.join(texts)}; the gradient differs most in "
                f"{difference.parameter}"
            )
    return ""


def format_step(step: int, record: StepRecord, reference: StepRecord, difference: Difference) -> str:
    """Return a table row: values of the layout, of one process, and their relative difference."""
    return (
        f"{step:>5}{record.loss:>13.8g}{reference.loss:>13.8g}{difference.loss:>13.1e}{record.grad_norm:>13.8g}"
        f"{reference.grad_norm:>13.8g}{difference.grad_norm:>13.1e}{difference.gradient:>13.1e}"
    )


def require_memory_of_one_process(args: RunArgs, device: str) -> None:
    """Check that the model fits on one process, if there is a planner."""
    if (planner := load_single("planner")) is None:
        return
    try:
        plan = planner.plan_run(single_process_args(args), DeviceSpec(device, 1, 1))
    except UserError:
        return  # the vocabulary size is unknown before the data is prepared
    limit = device_memory(device)
    if plan.memory.total <= limit:
        return
    raise UserError(
        f"--devices {args.devices}: {plan.model.name} does not fit on one process for comparison: it needs about "
        f"{plan.memory}, and {limit / 1e9:,.1f} GB are there; compare fewer layers: `toolkit "
        f"verify_parallel pretrain {plan.model.name} --model_config.n_layer 2` with the same devices and strategy"
    )
