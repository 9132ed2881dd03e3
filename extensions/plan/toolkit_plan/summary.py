"""Format the output of `toolkit plan` as plain values and as a table."""

from typing import Any

from toolkit.ui.formats import format_learning_rate

_GB = 1e9
Values = dict[str, Any]  # a plan, or a part of one, as in JSON
_DESCRIPTIONS = {
    "weights": "",
    "quantized_base": "weights in 4 bits",
    "adapters": "in fp32",
    "frozen_model": "weights of the objective's frozen model",
    "gradients": "",
    "optimizer": "state",
    "update": "gradients and moments in fp32 during an optimizer step",
    "cast_weights": "autocast's 16-bit copies",
    "unsharded_unit": "FSDP all-gathers: current unit, next unit and root",
    "gathered_context": "context parallel: keys and values of a layer while they are gathered",
    "activations": "saved for the backward pass",
    "recomputed_block": "backward pass of one block, with recomputed activations",
    "logits": "one chunk, and the head's gradient",
    "gathered_weights": "FSDP: all weights, unsharded, while answers are generated",
    "held_weights": "quantized once for these answers",
    "kv_cache": "keys and values of these answers",
    "checkpoint_copy": "state that is being written (--train.async_save)",
    "context": "CUDA context and fragmentation, estimated",
}
_RECOMPUTED = {
    "none": "nothing",
    "selective": "activations, but not attention and every second matrix product (activation checkpointing: selective)",
    "full": "all activations of a block except its input (activation checkpointing: full)",
}
_TF32 = (
    'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 ("high" instead of "highest", TF32): fp32 products up to 8 times as fast, '
    "rounded to 11 of 24 bits"
)
_PARTS = {
    "products": "matrix products",
    "attention": "",
    "memory_bound": "element-wise operators, norms, casts",
    "launch": "the GPU waits for the host",
    "optimizer": "norm, clipping, update",
}


def plan_summary(plan: Any, device_memory_gb: float | None, node_memory_gb: float, advice: list[Any]) -> Values:
    """Convert a :class:`toolkit_plan.plan.RunPlan` to JSON-serializable values.

    ``memory_gb`` has the parts, and the peak as ``total``. The peak is less than the sum of the parts if they are not
    in memory at the same time, such as activations and gradients in the backward pass.
    """
    total, config = plan.memory.total / _GB, plan.config
    fits = device_memory_gb is not None and total <= device_memory_gb and plan.node_memory / _GB <= node_memory_gb
    return {
        "command": config.args.command,
        "model": plan.model.name,
        "note": plan.note or None,
        "device": config.devices.device,
        "devices": config.devices.devices,
        "num_nodes": config.devices.num_nodes,
        "preset": config.preset,
        "strategy": str(config.strategy),
        "units": plan.units,
        "stages": plan.stages,
        "precision": config.precision,
        "has_tf32": config.devices.is_ampere,
        "lr_scaling": plan.lr_scaling,
        "learning_rate": None if config.steps is None else _learning_rates(config.schedule),
        "schedule": None if config.schedule is None else str(config.schedule),
        "optimizer": config.optimizer["name"],
        "global_batch_size": config.batch.global_batch_size,
        "answers": config.batch.answers,
        "micro_batch_size": config.batch.micro_batch_size,
        "data_parallel": config.batch.data_parallel,
        "compiler": plan.compiler[0],
        "reasons": config.reasons | ({"compiler": plan.compiler[1]} if plan.compiler[1] else {}),
        "gradient_accumulation_steps": config.batch.accumulation,
        "activation_checkpointing": config.args.train.activation_checkpointing,
        "accumulate": config.accumulate,
        "max_seq_length": plan.seq_length,
        "tokens_per_step": plan.tokens_per_step,
        "data": plan.data,
        "stand_in": plan.stand_in,
        "steps": config.steps,
        "length": plan.length or None,
        "parameters": dict(vars(plan.parameters)),
        "memory_gb": {name: round(size / _GB, 3) for name, size in plan.memory.parts().items()}
        | {"total": round(total, 3)},
        "host_memory_gb": round(plan.memory.host / _GB, 3),
        "host_copy_gb": round(plan.memory.host_copy / _GB, 3),
        "device_memory_gb": device_memory_gb,
        "node": {"memory_gb": round(plan.node_memory / _GB, 3), "limit_gb": round(node_memory_gb, 3)},
        "fits": None if device_memory_gb is None else fits,
        "advice": [{name: round(v, 3) if type(v) is float else v for name, v in vars(a).items()} for a in advice],
    }


def _learning_rates(schedule: Any) -> Values:
    """Return the learning rate at the first step, after the warm-up and at the last step, and at 20 even steps."""
    last = schedule.total_steps
    points = {step: schedule.learning_rate(step - 1) for step in (1, max(1, schedule.warmup_steps), last)}
    curve = [schedule.learning_rate(round(i * (last - 1) / 19)) for i in range(20)]
    return {"schedule": schedule.shape, "by_step": points, "curve": curve}


def _format_learning_rates(rates: Values) -> str:
    """Return ``cosine, 8.0e-06 at step 1, 4.0e-04 at step 50, 4.0e-05 at step 1,000  ▁▄██▇▆...``."""
    points = [f"{format_learning_rate(rate)} at step {int(step):,}" for step, rate in rates["by_step"].items()]
    bars = "".join("▁▂▃▄▅▆▇█"[round(7 * rate / max(rates["curve"]))] for rate in rates["curve"])
    return f"{', '.join([rates['schedule'], *points])}  {bars}"


def speed_summary(gpu_name: str, marketed_gb: int, prediction: Any, variants: list[Any], steps: int | None) -> Values:
    """Convert a :class:`toolkit_plan.predict.Prediction` to JSON-serializable values.

    ``parts_ms`` add up to ``step_ms``. ``variants`` are flag changes with the predicted relative gain in tokens/s.
    """
    return {
        "gpu": gpu_name,
        "gpu_marketed_gb": marketed_gb,
        "measured": False,
        "step_ms": round(prediction.seconds * 1e3, 2),
        "tokens_per_sec": round(prediction.tokens_per_sec),
        "mfu": None if prediction.mfu is None else round(prediction.mfu, 4),
        "steps": steps,
        "run_seconds": None if steps is None else round(steps * prediction.seconds, 1),
        "parts_ms": {name: round(time * 1e3, 2) for name, time in prediction.parts.items()},
        "kernels_per_micro_step": prediction.kernels,
        "gb_per_micro_step": round(prediction.bytes / _GB, 2),
        "communication_ms": round(prediction.links.sent * 1e3, 2),
        "links": prediction.links.links,
        "notes": list(prediction.notes),
        "variants": [
            {"change": v.change, "gain": round(v.gain, 4), "tokens_per_sec": round(v.prediction.tokens_per_sec)}
            for v in variants
        ],
    }


def format_plan(summary: Values) -> str:
    """Format :func:`plan_summary` as a table."""
    counts, memory = summary["parameters"], summary["memory_gb"]
    world = summary["devices"] * summary["num_nodes"]
    sharded = ", their gradients sharded" if summary["accumulate"] == "sharded" else ""
    answers = f" x {n} answers" if (n := summary["answers"]) > 1 else ""
    where, readers = f"{world} x {summary['device']}", summary["data_parallel"]  # several may read the same rows
    lines = [
        f"Model      {summary['model']}: {counts['total']:,} parameters, {counts['trained']:,} trained, "
        f"{counts['matmul']:,} in matrix products",
        *([f"           {note}"] if (note := summary["note"]) else []),
        f"Devices    {where}, {summary['precision']}, {summary['optimizer']}",
        *([f"           {_TF32}"] if summary["precision"] == "32-true" and summary["has_tf32"] else []),
        *([f"Preset     {summary['preset']}"] if summary["preset"] else []),
        f"Strategy   {summary['strategy']}",
        *([f"Pipeline   {summary['stages']}"] if summary["stages"] else []),
        *([f"FSDP units {summary['units']}"] if summary["units"] else []),
        f"Batch      {summary['global_batch_size']}{answers} = micro batch {summary['micro_batch_size']} x "
        f"{readers} device{'s' if readers > 1 else ''} x {summary['gradient_accumulation_steps']} accumulated{sharded}",
        *([f"           micro batch {reason}"] if (reason := summary["reasons"].get("train.micro_batch_size")) else []),
        *([f"           {scaled}"] if (scaled := summary["lr_scaling"]) else []),
        *([f"LR         {_format_learning_rates(rates)}"] if (rates := summary["learning_rate"]) else []),
        *([f"LR         {shape}"] if rates is None and (shape := summary["schedule"]) else []),
        f"Compiler   {summary['compiler']}{f' ({why})' if (why := summary['reasons'].get('compiler')) else ''}",
        f"Recompute  {_RECOMPUTED[summary['activation_checkpointing']]}",
        f"Tokens     {summary['tokens_per_step']:,} per step, sequences of {summary['max_seq_length']:,}",
        f"Data       {summary['data']}",
        *([f"           {note}"] if (note := summary["stand_in"]) else []),
        *([f"Length     {length}"] if (length := summary["length"]) else []),
        "",
        "Memory per device, GB",
    ]
    parts = {name: size for name, size in memory.items() if name != "total" and size > 0}
    lines += [f"  {name:16}{size:9.2f}  {_DESCRIPTIONS[name]}".rstrip() for name, size in parts.items()]
    reason = ""
    if sum(parts.values()) > memory["total"] + 0.005 * len(parts):
        reason = "  less than the sum: gradients replace activations, and each recomputed block the one before"
    lines += [f"  {'total':15}{memory['total']:10.2f}{reason}"]
    if host := summary["host_memory_gb"]:
        lines.append(f"  {'in CPU memory':15}{host:10.2f}  per process: shards of weights, gradients and optimizer")
    if copy := summary["host_copy_gb"]:
        lines.append(f"  {'in CPU memory':15}{copy:10.2f}  {_DESCRIPTIONS['checkpoint_copy']}")
    if node := summary["node"]["memory_gb"]:
        limit = summary["node"]["limit_gb"]
        lines.append(f"  {'of a node':15}{node:10.2f}  CPU memory; a node has {limit:,.1f} (--host_memory_gb)")
    missing = [f"Not yet complete: {message}" for message in summary.get("missing", ())]
    return "\n".join(lines + _verdict(summary) + _speed(summary) + missing)


def _speed(summary: Values) -> list[str]:
    """Format :func:`speed_summary` as lines; empty without a speed prediction."""
    speed = summary.get("speed")
    if speed is None:
        return []
    world = summary["devices"] * summary["num_nodes"]
    mfu = "" if speed["mfu"] is None else f", MFU {speed['mfu']:.1%}"
    unit, size = ("ms", 1) if speed["step_ms"] < 10_000 else ("s", 1000)
    does_not_fit = "; does not fit in memory" if summary["fits"] is False else ""
    samples = f"{1000 * summary['global_batch_size'] / speed['step_ms']:,.3g} samples/s"
    lines = [
        "",
        f"Speed on {world} x {speed['gpu']} (prediction; not measured on a GPU{does_not_fit})",
        f"  {'step':15}{speed['step_ms'] / size:10,.1f}  {unit}: {speed['tokens_per_sec']:,} tokens/s, {samples}{mfu}",
    ]
    sent = f"not overlapped, of {speed['communication_ms'] / size:,.1f} {unit} over {speed['links']}"
    for name, time in speed["parts_ms"].items():
        if name != "communication" or speed["links"]:
            description = sent if name == "communication" else _PARTS[name]
            lines.append(f"  {name.replace('_', ' '):15}{time / size:10,.1f}  {description}".rstrip())
    if speed["steps"] is not None:
        units = {"days": 86_400, "h": 3_600, "min": 60, "s": 1}  # the largest of which there are at least 2
        unit = next((unit for unit, size in units.items() if speed["run_seconds"] >= 2 * size), "s")
        number = speed["run_seconds"] / units[unit]
        lines.append(f"  {'run':15}{number:10,.1f}  {unit}: {speed['steps']:,} steps, without validation and saving")
    lines.append(
        f"  Each micro-batch: {speed['kernels_per_micro_step']:,} kernels of all kinds, which read and write "
        f"{speed['gb_per_micro_step']:,.1f} GB of GPU memory"
    )
    lines += [f"  {note}" for note in speed["notes"]]
    if speed["variants"]:
        lines += ["", "Faster, by prediction:"]
        lines += [f"  {v['gain']:+7.0%}  {v['change']}: {v['tokens_per_sec']:,} tokens/s" for v in speed["variants"]]
    return lines


def format_simulation(simulated: Values) -> str:
    """Format :func:`toolkit_plan.simulate.compare_with_plan` as a table."""
    lines = [
        "",
        f"Rank {simulated['rank']} of {simulated['ranks']}, simulated in {simulated['seconds']:.0f} s: memory at its "
        f"peak ({simulated['phase']}), GB",
        f"  {'':18}{'simulated':>10}{'planned':>10}",
    ]
    for name, (size, planned) in simulated["memory_gb"].items():
        line = f"  {name:18}{size:10.2f}"
        if planned is not None:
            line += f"{planned:10.2f}" + (f"{planned / size - 1:+9.1%}" if size >= 0.01 else "")
        lines.append(line)
    lines += ["Collectives of a step: operation, mesh dimensions, calls, GB"]
    for name, dimensions, calls, size in simulated["collectives"]:
        lines.append(f"  {name:22}{dimensions:22}{calls:6}{size:10.2f}")
    return "\n".join(lines)


def _verdict(summary: Values) -> list[str]:
    limit = summary["device_memory_gb"]
    if limit is None:
        return ["", "Use --device_memory_gb to check whether this fits."]
    memory = f"{limit:g} GB"
    if "speed" in summary:
        gpu, marketed_gb = summary["speed"]["gpu"], summary["speed"]["gpu_marketed_gb"]
        memory += f" ({limit / 1.074:.0f} GiB of the {gpu if 'GB' in gpu else f'{marketed_gb} GB {gpu}'})"
    if summary["fits"]:
        return ["", f"Fits into {memory}."]
    if summary["memory_gb"]["total"] <= limit:
        memory = f"{summary['node']['limit_gb']:g} GB of CPU memory per node"
    lines = ["", f"Does not fit into {memory}. Changes, in this order:"]
    for number, advice in enumerate(summary["advice"], 1):
        node = f", {advice['node_memory_gb']:,.0f} GB of CPU memory per node" if advice["node_memory_gb"] else ""
        line = f"  {number}. {advice['change']:45} {advice['memory_gb']:.2f} GB{node}"
        lines.append(", ".join(filter(None, [line, advice["quality_cost"], "fits" * advice["fits"]])))
    if not any(advice["fits"] for advice in summary["advice"]):
        lines.append("  These changes are not enough; use more --devices, --num_nodes, or a smaller model or --lora_r.")
    return lines
