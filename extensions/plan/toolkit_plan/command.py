"""`toolkit plan`: batch, parameters and memory of a run before it starts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Timer
from typing import Literal

from jsonargparse.typing import PositiveFloat

from toolkit.config import TrainingCommand
from toolkit.distributed.gpus import find_gpu
from toolkit.errors import notice
from toolkit.planning.compatibility import ROWS
from toolkit.planning.training_options import TrainingOptions
from toolkit_plan.summary import format_plan, format_simulation, plan_summary, speed_summary

PROGRESS_AFTER_S = 2.0


def setup(
    command: TrainingCommand | Literal["compatibility"],
    run: TrainingOptions | None = None,
    device_memory_gb: PositiveFloat | None = None,
    host_memory_gb: PositiveFloat | None = None,
    speed: str | None = None,
    simulate: bool = False,
    format: Literal["text", "json"] = "text",
) -> None:
    """Show the resolved settings of a run, and its memory per device by component.

    Put plan before the command that you would run:

    toolkit plan pretrain pythia-160m --devices 8 --train.micro_batch_size 8 --device_memory_gb 80

    `toolkit plan COMMAND --help` shows all options, `toolkit plan compatibility` the options that are not supported
    together. Nothing is started or prepared: neither GPUs, weights nor data are needed. The plan is for GPUs unless you
    set --accelerator cpu. checkpoint_dir may also be the name of an architecture, such as meta-llama/Llama-2-7b-hf. All
    sequences are assumed to have the maximum length, --train.max_seq_length.

    Args:
        command: The command to plan: pretrain, finetune_full or finetune_lora; or compatibility.
        run: Options of the command.
        device_memory_gb: Memory of one device in GB (1e9 bytes), to check whether the run fits and suggest changes.
            It also determines the micro-batch if that is auto. Default: the memory of the GPU of --speed, else of this
            machine's devices.
        host_memory_gb: CPU memory of one node in GB, to check whether the run fits. Default: this machine's.
        speed: Also predict step time, tokens/s and MFU on a GPU, such as H200, H100, A100 or 4090, and suggest faster
            settings. Nothing is measured.
        simulate: Check the memory plan: run a step of rank 0 on tensors without data, in a layout of any size. Needs no
            GPU and no memory; 8B parameters take about a minute, 70B several, and each accumulated micro-batch as long.
        format: Text table, or JSON.
    """
    if run is None:  # compatibility
        print(*(row.message() for row in ROWS), sep="\n")
        return
    if speed is not None:
        name, card = find_gpu(speed, run.shared.accelerator)
        device_memory_gb = device_memory_gb or card.memory / 1e9
    from toolkit.distributed.device import device_memory
    from toolkit.planning.resolve import device_spec_of
    from toolkit_plan.advice import advice_for
    from toolkit_plan.plan import missing_parts, plan_with_data, run_args_of

    predicted = None
    with _progress(), run_args_of(run) as args:
        if speed is not None:
            from toolkit_plan.predict import predict
            from toolkit_plan.suggestions import suggestions

        spec = device_spec_of(args, device_memory_gb)
        plan = plan_with_data(
            args, spec if speed is None else replace(spec, has_bf16=card.generation.has_bf16, gpu=name)
        )
        host_memory_gb = host_memory_gb or device_memory("cpu") / 1e9
        advice = [] if device_memory_gb is None else advice_for(plan, device_memory_gb, host_memory_gb)
        if speed is not None:
            prediction = predict(plan, card)
            predicted = (name, card.marketed_gb, prediction, suggestions(plan, card, prediction), plan.config.steps)
        missing = missing_parts(args, run, plan.refusal)
    summary = plan_summary(plan, device_memory_gb, host_memory_gb, advice) | {"missing": missing}
    if predicted is not None:
        summary["speed"] = speed_summary(*predicted)
    if format == "text":
        print(format_plan(summary), flush=True)
    if simulate:
        from toolkit_plan.simulate import compare_with_plan

        summary["simulated"] = compare_with_plan(plan)
        if format == "text":
            print(format_simulation(summary["simulated"]))
    if format == "json":
        print(json.dumps(summary, indent=2))


@contextmanager
def _progress() -> Iterator[None]:
    """Print a line on stderr if planning takes long. Ctrl-C ends it."""
    timer = Timer(PROGRESS_AFTER_S, notice, ["planning ..."])
    with suppress(RuntimeError):  # no spare thread
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
