"""Plan a run before it starts, with the functions that the run uses: settings, parameters and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.checkpoints.find import find_checkpoint_dir
from toolkit.checkpoints.folder import CONFIG, write_model_config
from toolkit.distributed.stages import STAGES_PER_RANK
from toolkit.distributed.units import describe_units, plan_units
from toolkit.errors import UserError, count_of
from toolkit.models.block import Block
from toolkit.models.config import ModelConfig
from toolkit.models.families import get_config, suggest_names
from toolkit.models.flops import Parameters, count_parameters
from toolkit.models.gpt import GPT
from toolkit.optim.schedule import describe_scaling
from toolkit.planning.auto import resolve_auto
from toolkit.planning.compiler import choose_compiler
from toolkit.planning.data import complete, describe_stand_in
from toolkit.planning.meta_model import model_of
from toolkit.planning.resolve import (
    DeviceSpec,
    ResolvedConfig,
    device_spec_of,
    resolve_model,
    with_default_limit,
    with_known_vocabulary,
)
from toolkit.planning.run_args import Changes, RunArgs, with_options
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import TrainingOptions, run_args
from toolkit_plan.measure.inputs import memory_inputs
from toolkit_plan.measure.memory import Memory, plan_memory
from toolkit_plan.measure.trace import StepMemory
from toolkit_plan.rows import Rows, UnpreparedRows, find_data, unprepared_rows


@dataclass(frozen=True)
class RunPlan:
    """Settings and memory estimate of a run.

    Args:
        args: The user's options.
        config: The resolved config; its model may lack the vocabulary size.
        rows: The data, as far as it was known.
        model: The architecture, with the vocabulary size.
        memory: The memory of one device.
        units: Description of the FSDP units; None for other strategies.
        refusal: Why the run would refuse its data or its length; empty if it would not.
        note: The model's note, such as how its weights are quantized; may be empty.
    """

    args: RunArgs
    config: ResolvedConfig
    rows: Rows
    model: ModelConfig
    parameters: Parameters
    memory: Memory
    units: str | None = None
    refusal: str = ""
    note: str = ""

    @cached_property
    def compiler(self) -> tuple[str, str]:
        """The compiler, and the reason if ``--compiler`` is "auto"."""
        return choose_compiler(self.config)

    @property
    def length(self) -> str:
        """Description of the run's length; empty if the run would be refused."""
        config, limits = self.config, self.config.limits
        if limits is None:
            return "" if self.refusal else "known when the data is prepared: --dry_run prepares it and says"
        about = "about " * (isinstance(self.rows, UnpreparedRows) and self.rows.epoch_rows is not None)
        length = f": {config.length}" if config.length else ""
        return "" if limits.total_steps is None else f"{about}{count_of(limits.total_steps, 'step')}{length}"

    @property
    def data(self) -> str:
        """The training data and its size, as far as it is known."""
        name, rows = type(self.args.data).__name__, self.rows
        if not isinstance(rows, UnpreparedRows):
            return f"{name}: {rows.summary}"
        size = "" if rows.epoch_rows is None else f"about {rows.epoch_rows:,} training rows, "
        return f"{name}: {size}{'streamed' if rows.is_streamed else 'not prepared yet'}"

    @property
    def stand_in(self) -> str | None:
        return describe_stand_in(replace(self.config, model=self.model), self.rows)

    @property
    def seq_length(self) -> int:
        return self.config.max_seq_length or self.model.block_size

    @property
    def node_memory(self) -> float:
        """Bytes of CPU memory that the processes of a node need in addition to device memory."""
        return self.config.devices.devices * (self.memory.host + self.memory.host_copy)

    @property
    def lr_scaling(self) -> str | None:
        schedule = self.config.schedule
        return None if schedule is None else describe_scaling(self.args.train, schedule, self.args.defaults)

    @property
    def stages(self) -> str | None:
        """Description of the pipeline stages; None without pipeline parallelism."""
        size, accumulation = self.args.pipeline_parallel_size, self.config.batch.accumulation
        if size == 1:
            return None
        return describe_stages(self.args.pipeline.schedule, size, self.model.n_layer, accumulation)

    @property
    def tokens_per_step(self) -> int:
        """Maximum tokens per optimizer step; rows may be shorter than the longest one."""
        batch = self.config.batch
        return batch.global_batch_size * batch.answers * self.seq_length


def describe_stages(schedule: str, size: int, n_layer: int, micro_batches: int) -> str:
    """Return the stages and the least idle time: ``4 stages of 8 layers, 1f1b, idle for at least 27 % of a step``."""
    n_stages = size * STAGES_PER_RANK[schedule]
    text = f"{n_stages} stages of {n_layer // n_stages} layers, {schedule}"
    if schedule == "zbv":
        return text
    work = micro_batches * STAGES_PER_RANK[schedule]  # in passes of a stage, of which size - 1 are waited for
    return f"{text}, idle for at least {(size - 1) / (work + size - 1):.0%} of a step".replace("%", " %")


def plan_run(args: RunArgs, devices: DeviceSpec, rows: Rows | None = None, refusal: str = "") -> RunPlan:
    """Resolve a run and estimate its memory, without starting it.

    Args:
        args, devices: The run.
        rows: The data; None if it is not prepared.
        refusal: Why the run would refuse its data.
    """
    args = _with_any_limit(args)
    config = resolve_auto(args, devices)
    rows = unprepared_rows(args, config.max_seq_length) if rows is None else rows
    try:
        config = complete(config, rows)
    except UserError as error:
        refusal = refusal or str(error)
    return replace(plan_resolved(args, config, rows), refusal=refusal)


def plan_with_data(args: RunArgs, devices: DeviceSpec) -> RunPlan:
    """Plan a run with its data if that is prepared, otherwise with what is known of it."""
    rows, refusal = None, ""
    try:
        rows = find_data(args, resolve_model(_with_any_limit(args), devices)[2])
    except UserError as error:
        refusal = str(error)
    return plan_run(args, devices, rows, refusal)


def _with_any_limit(args: RunArgs) -> RunArgs:
    """Return the options with the default limit, or an epoch where the run would refuse to start without a limit."""
    try:
        return with_default_limit(args)
    except UserError:  # the length does not matter for the memory
        return with_options(args, {"train.epochs": 1})


def plan_resolved(args: RunArgs, config: ResolvedConfig, rows: Rows) -> RunPlan:
    """Estimate the memory of a resolved run."""
    model = with_known_vocabulary(config.model, args)
    inputs = memory_inputs(config, model)
    built = model_of(model, args.lora)
    units = None
    if config.strategy.kind == "fsdp":
        part = model_of(model, args.lora, config.strategy.layout.tensor)
        units = describe_units(plan_units(part, config.fsdp, (Block,)), config.fsdp)
    memory = plan_memory(inputs, built)
    return RunPlan(args, config, rows, model, count_parameters(built), memory, units, note=built.note)


def require_memory(config: ResolvedConfig, model: GPT) -> None:
    """Check that weights, gradients and optimizer state fit in device memory. ``model`` is on the meta device."""
    limit = config.devices.memory
    inputs = memory_inputs(config, model.config)
    if plan_memory(inputs, model, StepMemory()).training_state > limit:
        memory = plan_memory(inputs, model)
        smaller = "--lora_r" if config.args.lora is not None else "model"
        raise UserError(
            f"{model.config.name}: needs about {memory} per device, but only {limit / 1e9:,.1f} GB is "
            f"available; use a smaller {smaller}, or run `toolkit plan` to see changes that make it fit"
        )


# ---- from the arguments of a command


@contextmanager
def run_args_of(options: TrainingOptions) -> Iterator[RunArgs]:
    """Yield the arguments of the run that has these options.

    A missing checkpoint folder is replaced by a temporary folder with the config of the named architecture.
    """
    value = options.initial_checkpoint_dir
    with TemporaryDirectory() as folder:
        if value is not None and not any(path.exists() for path in (Path(value), Path("checkpoints") / value)):
            try:
                config = get_config(value)
            except UserError as error:
                raise UserError(
                    f"{options.checkpoint_option} {value}: no such folder, also not below checkpoints/, and no "
                    f"architecture of that name{suggest_names(value)}"
                ) from error
            write_model_config(config, Path(folder, CONFIG))
            changes: Changes = {options.checkpoint_option: folder}
            options = replace(options, **changes)
        yield run_args(options)


def plan_options(options: TrainingOptions, device_memory_gb: float | None) -> RunPlan:
    """Plan the run that has these options, on devices with this memory."""
    with run_args_of(options) as args:
        return plan_run(args, device_spec_of(args, device_memory_gb))


def missing_parts(args: RunArgs, options: TrainingOptions, refusal: str) -> list[str]:
    """Return the errors with which the planned run would not start: ``refusal``, of its data, if there is no other."""
    value, errors = options.initial_checkpoint_dir, list[str]()
    checks: tuple[Callable[[], object], ...] = (
        lambda: with_default_limit(args),
        lambda: value is None or find_checkpoint_dir(value, options.checkpoint_option),
        lambda: check_start(replace(args, dry_run=True)),  # its nodes have another environment
    )
    for check in checks:
        try:
            check()
        except UserError as error:
            errors.append(str(error))
    folder = str(args.initial_checkpoint_dir)  # maybe temporary, see run_args_of
    return [error.replace(folder, str(value)) for error in errors or filter(None, [refusal])]
