"""What `toolkit plan` shows: the facts as plain values, and as a table."""

from __future__ import annotations

from typing import Any

_GB = 1e9
_MEANING = {
    "weights": "",
    "quantized_base": "weights in 4 bits",
    "adapters": "whole on every device",
    "gradients": "",
    "optimizer": "its state",
    "cast_weights": "16-bit copies that autocast makes",
    "unsharded_unit": "what FSDP gathers for one block, the next and the root",
    "activations": "kept for the backward pass",
    "logits": "one chunk, and the gradient of the head",
    "context": "CUDA's own and gaps, estimated",
}


def plan_facts(command: str, plan: Any, device_memory_gb: float | None, advice: list[Any]) -> dict[str, Any]:
    """Return what there is to say of a :class:`toolkit.training.plan.RunPlan`, ready for JSON.

    ``memory_gb`` has the parts and their ``total``, the peak: less than the sum where gradients only come as
    activations go.
    """
    total = plan.memory.total / _GB
    return {
        "command": command,
        "model": plan.config.name,
        "device": plan.place.device,
        "devices": plan.place.devices,
        "num_nodes": plan.place.num_nodes,
        "strategy": str(plan.strategy),
        "precision": plan.precision,
        "optimizer": plan.optimizer["name"],
        "global_batch_size": plan.batch.global_batch_size,
        "micro_batch_size": plan.batch.micro_batch_size,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "max_seq_length": plan.seq_length,
        "tokens_per_step": plan.tokens_per_step,
        "parameters": dict(vars(plan.parameters)),
        "memory_gb": {name: round(size / _GB, 3) for name, size in plan.memory.parts().items()}
        | {"total": round(total, 3)},
        "device_memory_gb": device_memory_gb,
        "fits": None if device_memory_gb is None else total <= device_memory_gb,
        "advice": [{"change": a.change, "memory_gb": round(a.memory_gb, 3), "fits": a.fits} for a in advice],
    }


def format_plan(facts: dict[str, Any]) -> str:
    """The facts as lines for people."""
    counts, memory = facts["parameters"], facts["memory_gb"]
    world = facts["devices"] * facts["num_nodes"]
    where = f"{world} x {facts['device']}"
    lines = [
        f"Model      {facts['model']}: {counts['total']:,} parameters, {counts['trained']:,} trained, "
        f"{counts['matmul']:,} in matrix products",
        f"Where      {where}, {facts['precision']}, {facts['optimizer']}",
        f"Strategy   {facts['strategy']}",
        f"Batch      {facts['global_batch_size']} = micro batch {facts['micro_batch_size']} x "
        f"{world} device{'s' if world > 1 else ''} x {facts['gradient_accumulation_steps']} accumulated",
        f"Tokens     {facts['tokens_per_step']:,} per step, sequences of {facts['max_seq_length']:,}",
        "",
        "Memory per device, GB",
    ]
    shown = {name: size for name, size in memory.items() if name != "total" and size > 0}
    lines += [f"  {name:15}{size:10.2f}  {_MEANING[name]}".rstrip() for name, size in shown.items()]
    total = memory["total"]
    apart = sum(shown.values()) > total + 0.005 * len(shown)
    lines += [f"  {'total':15}{total:10.2f}{'  gradients come as activations go' if apart else ''}"]
    return "\n".join(lines + _verdict(facts))


def _verdict(facts: dict[str, Any]) -> list[str]:
    limit = facts["device_memory_gb"]
    if limit is None:
        return ["", "Give --device_memory_gb to see whether this fits."]
    if facts["fits"]:
        return ["", f"Fits into {limit:g} GB."]
    lines = ["", f"Does not fit into {limit:g} GB. In this order:"]
    for number, advice in enumerate(facts["advice"], 1):
        fits = ", fits" if advice["fits"] else ""
        lines.append(f"  {number}. {advice['change']:45} {advice['memory_gb']:.2f} GB{fits}")
    if not any(advice["fits"] for advice in facts["advice"]):
        lines.append("  That is not enough; take more devices, or a smaller model.")
    return lines
