"""`toolkit verify_parallel`: compare the first steps of a run on its layout and on one process."""

from __future__ import annotations

from dataclasses import replace
from tempfile import TemporaryDirectory

from toolkit.diagnostics.comparison import VALUES, Difference, choose_splits, choose_tolerance, compare
from toolkit.diagnostics.environment import memory_limit
from toolkit.diagnostics.gradients import GradientRecorder, StepRecord
from toolkit.diagnostics.single_process import run_single_process
from toolkit.distributed import ranks
from toolkit.distributed.device import device_memory
from toolkit.errors import DifferenceError, UserError, require_option
from toolkit.models.config import ModelOverrides
from toolkit.planning.auto import resolve_auto
from toolkit.planning.plan import format_memory, plan_run
from toolkit.planning.resolve import DeviceSpec, ResolvedConfig
from toolkit.planning.run_args import RunArgs
from toolkit.training.callbacks.loading import load_callbacks
from toolkit.training.engine import start
from toolkit.training.launch import detect_devices
from toolkit.training.run import Run
from toolkit.training.short_run import short_run_args, single_process_args

_NAMES = {
    "loss": "the loss",
    "grad_norm": "the gradient norm",
    "gradient": "a parameter's gradient",
    "logged_norm": "the logged gradient norm",
}
_COLUMNS = ("step", "loss", "one process", "difference", "grad norm", "one process", "difference", "gradients")


def verify_parallel(args: RunArgs, steps: int) -> None:
    """Compare the first steps of a run with the same steps on one process. Every process of the run calls this.

    Rank 0 first trains on one process while the other ranks wait.
    """
    device, world = detect_devices(args)
    if world.world_size == 1:
        raise UserError(
            f"--devices {args.devices}: a single process has nothing to compare; use 2 or more, or torchrun"
        )
    size = args.pipeline_parallel_size
    hint = "verify_parallel compares gradients of complete models; use 1"
    require_option(size == 1, "pipeline_parallel_size", size, hint)
    with TemporaryDirectory(prefix="toolkit-") as folder:
        trial = short_run_args(args, steps, folder)
        config = resolve_auto(trial, DeviceSpec.of_this_machine(device, world.devices, world.num_nodes))
        callbacks, check = load_callbacks(args.callbacks), LayoutCheck()
        if world.global_rank == 0:
            require_memory_of_one_process(config.args, device)
            _announce(args, config)
            check.run_references(args, steps, config)
            print(f"On {world.world_size} ranks:", flush=True)
        start(config, world, [*callbacks, check], is_short=True)


class LayoutCheck(GradientRecorder):
    """Prints each step next to its single-process reference on rank 0, and raises an error if they differ."""

    def __init__(self) -> None:
        super().__init__()
        self.reference: list[StepRecord] = []  # on rank 0
        self.tolerance: Difference | None = None
        self.differences: list[Difference] = []

    def run_references(self, args: RunArgs, steps: int, config: ResolvedConfig, quiet: bool = False) -> None:
        """Train on one process. In 16 bits, repeat with other micro-batch sizes to choose the tolerance.

        ``config`` is the resolved configuration of ``args``. With ``quiet`` the child process prints nothing.
        """
        print("One process:", flush=True)
        self.reference = run_single_process(args, steps, config.device, config.batch.micro_batch_size, quiet)
        splits = []
        if config.precision != "32-true":
            for size in choose_splits(config.batch.global_batch_size, config.batch.micro_batch_size):
                print(f"One process, micro batch {size}, for the tolerance of {config.precision}", flush=True)
                splits.append(run_single_process(args, steps, config.device, size, quiet=True))
        self.tolerance = choose_tolerance(config.precision, self.reference, splits)

    def on_step_end(self, trainer: Run, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, metrics)
        if len(self.records) <= len(self.reference):
            record, reference = self.records[-1], self.reference[len(self.records) - 1]
            difference = compare(record, reference)
            if not self.differences:
                trainer.display.message(_row(_COLUMNS))
            self.differences.append(difference)
            trainer.display.message(format_step(trainer.progress.step, record, reference, difference))

    def on_train_end(self, trainer: Run) -> None:
        tolerance, failure = self.tolerance, ""
        if tolerance is not None:
            failure = find_failure(self.differences, tolerance)
            if not failure:
                largest = [max(getattr(each, name) for each in self.differences) for name in VALUES[:3]]
                texts = [
                    f"{value:.1e} in {_NAMES[name]} (tolerance {getattr(tolerance, name):.1e})"
                    for name, value in zip(VALUES, largest, strict=False)
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
        if names := difference.exceeding_values(tolerance):
            texts = [
                f"{_NAMES[name]} by {getattr(difference, name):.1e} (tolerance {getattr(tolerance, name):.1e})"
                for name in names
            ]
            return (
                f"step {step}: differs from one process in {', '.join(texts)}; the gradient differs most in "
                f"{difference.parameter}"
            )
    return ""


def format_step(step: int, record: StepRecord, reference: StepRecord, difference: Difference) -> str:
    """Return a table row: values of the layout, of one process, and their relative difference."""
    cells = [str(step)]
    for name in ("loss", "grad_norm"):
        values = (getattr(record, name), getattr(reference, name))
        cells += [*(f"{value:.8g}" for value in values), f"{getattr(difference, name):.1e}"]
    return _row([*cells, f"{difference.gradient:.1e}"])


def require_memory_of_one_process(args: RunArgs, device: str) -> None:
    """Check that the model fits on one process, by the memory plan."""
    single = single_process_args(args)
    try:
        plan = plan_run(single, DeviceSpec(device, 1, 1))
    except UserError:
        return  # the vocabulary size is unknown before the data is prepared
    limit = min(device_memory(device), (memory_limit() or float("inf")) if device == "cpu" else float("inf"))
    if plan.memory.total <= limit:
        return
    layers, total = plan.model.n_layer, plan.memory.total
    while layers > 1 and total > limit:
        layers //= 2
        overrides = ModelOverrides(**vars(single.model_config) | {"n_layer": layers})
        fewer = replace(single, model_config=overrides)
        total = plan_run(fewer, DeviceSpec(device, 1, 1)).memory.total
    fix = f"--model_config.n_layer {layers}"
    if total > limit:
        fix = f"{fix} and a smaller --train.micro_batch_size or --train.max_seq_length"
    if args.initial_checkpoint_dir is not None:
        fix = f"`toolkit verify_parallel pretrain {plan.model.name} {fix}` with the same devices and strategy"
    raise UserError(
        f"--devices {args.devices}: {plan.model.name} does not fit on one process for comparison: it needs about "
        f"{format_memory(plan.memory)}, and {limit / 1e9:,.1f} GB are there; compare fewer layers, {fix}"
    )


def _announce(args: RunArgs, config: ResolvedConfig) -> None:
    """Print which steps are compared and which options are ignored."""
    train = config.args.train
    print(f"Comparing {train.max_steps} steps of {args.command}, {config.precision}, {config.batch}", flush=True)
    if args.lora is not None and args.lora.dropout:
        print(f"note: --lora_dropout {args.lora.dropout} is set to 0: random numbers differ by rank", flush=True)
    if args.resume:
        print(f"note: --resume {args.resume} is ignored: the comparison starts at step 1", flush=True)


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"{cells[0]:>5}" + "".join(f"{cell:>13}" for cell in cells[1:])
