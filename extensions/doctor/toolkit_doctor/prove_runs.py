"""Rows of `toolkit doctor --prove` for runs: 8 steps of pico-llama on random tokens, started as commands."""

import json
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from toolkit.checkpoints.folder import write_model_files
from toolkit.checkpoints.weights import load_weights
from toolkit.data.tokenizer import train_bpe
from toolkit.distributed.gpus import find_gpu
from toolkit.errors import UserError, require_bitsandbytes
from toolkit.models.families import get_config
from toolkit.models.fp8 import require_fp8
from toolkit.models.gpt import GPT
from toolkit_doctor.prove_row import STEPS, Machine, NotRunError, Outcome, Row, metrics_of

_FP32 = "--precision 32-true"
_EXACT = "--deterministic true"
_MIXED = "--precision bf16-mixed"


def _curve(
    options: str, tolerance: float, machine: Machine, reference: str = _FP32, device: str = "cpu", **command: str
) -> Outcome:
    """Compare losses and gradient norms with a reference run. ``command`` may replace pretrain."""
    runs = machine.train(options, **command), machine.train(reference, device, **command)
    curves = [metrics_of(run, "loss") + metrics_of(run, "grad_norm") for run in runs]
    return Outcome(max(abs(a - b) / abs(b) for a, b in zip(*curves, strict=True)), tolerance)


def _scaler(machine: Machine) -> Outcome:
    machine.require_cuda()  # 16-mixed is refused on a CPU
    return _curve("--precision 16-mixed", 0.02, machine)


def _several(machine: Machine) -> int:
    if machine.n_devices < 2:
        raise NotRunError("one GPU")
    return min(8, 1 << (machine.n_devices.bit_length() - 1))  # divides the global batch


def _sharded(precision: str, tolerance: float, machine: Machine) -> Outcome:
    options = f"{precision} --train.micro_batch_size 1 --strategy fsdp --devices {_several(machine)}"
    return _curve(options, tolerance, machine, precision, device="")


def _fp8(kind: str, is_sharded: bool, machine: Machine) -> Outcome:
    require_fp8(kind, machine.device.type)
    fp8 = f"{_MIXED} --train.fp8 {kind}"
    return _sharded(fp8, 0.02, machine) if is_sharded else _curve(fp8, 0.02, machine, _MIXED, "")


def _collectives(machine: Machine) -> Outcome:
    machine.command(f"doctor --comm --accelerator {machine.device.type} --devices {_several(machine)}")
    return Outcome(0, 0)  # the command fails if a value is wrong


def _qlora(machine: Machine) -> Outcome:
    require_bitsandbytes("--quantize")
    base = machine.folder / "base"
    config = replace(get_config("pico-llama"), intermediate_size=192).with_vocab_size(512)  # a multiple of 64
    torch.manual_seed(0)
    base.mkdir()
    write_model_files(
        base, state_dict=GPT(config).state_dict(), config=config, hyperparameters=None,
        tokenizer=train_bpe(["a tokenizer of one text"], 300),
    )  # fmt: skip
    return _curve(_FP32, 1e-3, machine, command=f"finetune_lora {base} --quantize bnb.nf4 {STEPS}")


def _weights(options: str, folder: str, machine: Machine) -> Outcome:
    """Count the weights that differ bit by bit from an undisturbed run with --deterministic."""
    expected = machine.train(_EXACT)
    a, b = (load_weights(out / folder) for out in (machine.train(options.format(run=expected)), expected))
    return Outcome(sum(not torch.equal(a[name], b[name]) for name in a.keys() | b.keys()), 0)


def _measure(name: str, tolerance: float, machine: Machine) -> Outcome:
    """Compare the planned memory or predicted tokens/s of a larger run with the measured figure."""
    machine.require_cuda()
    command = (
        "pretrain pythia-160m --data SyntheticTokens --train.max_seq_length 1024 --train.micro_batch_size 8 "
        "--train.global_batch_size 16 --train.max_steps 12 --precision bf16-mixed --compiler none --devices 1 "
        "--train.save_interval 0 --eval.final_validation false"
    )
    gpu = ""
    with suppress(UserError):  # unknown GPU
        gpu = f"--speed {find_gpu(torch.cuda.get_device_name())[0]}"
    plan = json.loads(machine.command(f"plan {command} --accelerator cuda --format json {gpu}"))
    out = machine.train("", command=command)
    if name == "memory":  # without the CUDA context, which torch does not count
        planned = plan["memory_gb"]["total"] - plan["memory_gb"]["context"]
        return Outcome(abs(planned / max(metrics_of(out, "peak_memory_gb")) - 1), tolerance)
    if not gpu:
        raise NotRunError(f"no figures of {torch.cuda.get_device_name()}")
    speeds = sorted(metrics_of(out, "tokens_per_sec")[4:])  # the first steps choose kernels and allocate memory
    return Outcome(abs(plan["speed"]["tokens_per_sec"] / speeds[len(speeds) // 2] - 1), tolerance)


_CPU = "losses and gradient norms against fp32 on the CPU"
_BF16 = "losses and gradient norms against bf16"
_OFFLOAD = "--precision 32-true --strategy fsdp --fsdp.cpu_offload true"
_ASYNC = f"{_EXACT} --train.async_save true"
_STEP = "step-00000004"
RUNS = [
    Row("curve, fp32", _CPU, "--accelerator cpu", partial(_curve, _FP32, 1e-3)),
    *(
        Row(f"curve, {name}", _CPU, "--precision 32-true", partial(_curve, f"--precision {name}", tolerance))
        for name, tolerance in (("bf16-mixed", 0.02), ("bf16-true", 0.05), ("bf16-master", 0.05))
    ),
    Row("curve, bf16 residual stream", _CPU, "--train.residual_dtype auto",
        partial(_curve, f"{_MIXED} --train.residual_dtype bf16", 0.02)),
    Row("fp16 scaler", _CPU, "--precision bf16-mixed", _scaler),
    Row("curve, compiled", _CPU, "--compiler none", partial(_curve, f"{_FP32} --compiler torch", 1e-3)),
    Row("resume", "bits of the final weights, resumed at half", "--resume false",
        partial(_weights, f"{_EXACT} --resume {{run}}/{_STEP}", "final")),
    Row("async save", "bits of the saved weights", "--train.async_save false", partial(_weights, _ASYNC, _STEP)),
    Row("CPU offload", _CPU, "--fsdp.cpu_offload false", partial(_curve, _OFFLOAD, 1e-3)),
    Row("QLoRA", "losses and gradient norms against the CPU", "finetune_lora without --quantize", _qlora),
    Row("AdamW8bit", _CPU, "--optimizer.name AdamW",
        partial(_curve, f"{_FP32} --optimizer.name AdamW8bit", 0.02)),
    Row("fp8, tensorwise", _BF16, "--train.fp8 none", partial(_fp8, "tensorwise", False)),
    Row("fp8, rowwise", _BF16, "--train.fp8 none", partial(_fp8, "rowwise", False)),
    Row("fp8 all-gather", "losses and gradient norms against one GPU", "--train.fp8 rowwise",
        partial(_fp8, "tensorwise", True)),
    Row("profile", _CPU, "--profile false", partial(_curve, f"{_FP32} --profile true", 1e-3)),
    Row("FSDP", "losses and gradient norms against one GPU", "--strategy ddp",
        partial(_sharded, _FP32, 1e-3)),
    Row("collectives", "values of all-reduce, all-gather and others", "--devices 1", _collectives),
    Row("planned memory", "of pythia-160m against the peak", "--train.micro_batch_size",
        partial(_measure, "memory", 0.15)),
    Row("predicted speed", "of pythia-160m against tokens/s", "--profile, to measure", partial(_measure, "speed", 0.3)),
]  # fmt: skip
