"""Run the products that scripts/benchmark.py compares, and read their figures.

Each run is a process of the real product in a folder with ``tokens`` (LitData) and ``tokens.npy``.
"""

import csv
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmark_processes import MALLOC, CompletedRun, RunFailedError, run_process, tail

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of, get_config

SEED, LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_NORM = 42, 4e-4, 0.1, (0.9, 0.95), 1.0
# `litgpt` without its final save, which has no option
LITGPT = (
    "from litgpt import pretrain; pretrain.save_checkpoint = lambda *_, **__: None; "
    "from litgpt.__main__ import main; main()"
)

# The fields shared by ModelConfig and LitGPT's Config (0.5.13).
LITGPT_FIELDS = {
    "name", "block_size", "vocab_size", "padded_vocab_size", "padding_multiple", "n_layer", "n_head", "n_query_groups",
    "n_embd", "head_size", "intermediate_size", "rotary_percentage", "rope_base", "rope_adjustments",
    "rope_local_base_freq", "rope_indices", "sliding_window_size", "sliding_window_indices", "attention_scores_scalar",
    "attention_logit_softcapping", "final_logit_softcapping", "norm_qk", "norm_qk_type", "latent_attention",
    "scale_embeddings", "parallel_residual", "shared_attention_norm", "bias", "attn_bias", "lm_head_bias",
    "norm_class_name", "norm_eps", "norm_1", "norm_2", "post_attention_norm", "post_mlp_norm", "mlp_class_name",
    "n_expert", "n_expert_per_token", "moe_intermediate_size", "norm_topk_prob", "routed_scaling_factor",
    "n_expert_groups", "n_topk_groups", "gelu_approximate",
}  # fmt: skip
# Fields that LitGPT infers from the name, takes as an option (tie_embeddings), or lacks (router_aux_loss_coef).
LITGPT_INFERS = {"family", "norm_offset", "norm_affine", "tie_embeddings", "router_aux_loss_coef"}


@dataclass
class Work:
    """The workload of a run.

    Args:
        batch_size: Sequences per step.
        model_config: Fields that override the named architecture.
        as_shipped: Use each product's defaults, except for model, tokens, batch and steps.
        micro_batch_size: Sequences per forward pass; 0: ``batch_size``.
        max_seconds: Limit for one run of one product, None: no limit.
        devices: Devices of toolkit; the peers take one.
        options: Further options of toolkit.
        switch: A Python statement that runs before toolkit, to switch something off for which there is no option.
        saves: Include the final save of toolkit and LitGPT, which takes minutes for a large model.
    """

    model: str
    seq_length: int
    batch_size: int
    precision: str
    compiler: str
    steps: int
    warmup_steps: int
    threads: int
    model_config: dict[str, Any] = field(default_factory=dict)
    as_shipped: bool = False
    micro_batch_size: int = 0
    activation_checkpointing: str = "none"
    accelerator: str = "auto"
    max_seconds: float | None = None
    devices: int = 1
    options: tuple[str, ...] = ()
    switch: str = ""
    saves: bool = False

    @property
    def micro(self) -> int:
        return self.micro_batch_size or self.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length


@dataclass
class Measurement:
    """One run of one product."""

    parameters: int
    tokens_per_sec: float
    tokens_per_sec_end_to_end: float
    peak_memory_gb: float
    mfu: float | None = None


def run_toolkit(work: Work, config: ModelConfig, folder: Path, python: str, name: str = "toolkit") -> Measurement:
    """Run `toolkit pretrain` and read its logs/metrics.csv."""
    out_dir = folder / "out" / name  # a folder "toolkit" in the working directory would hide the package
    code = f"{work.switch}; import sys; from toolkit.cli import main; sys.exit(main())"
    main = ["-c", code] if work.switch else ["-m", "toolkit"]
    command = [
        python, *main, "pretrain", work.model, f"--out_dir={out_dir}",
        "--data=LitData", f"--data.data_path={folder / 'tokens'}", "--data.split_names=null", "--data.num_workers=0",
        f"--train.max_steps={work.steps}", f"--train.max_seq_length={work.seq_length}",
        f"--train.global_batch_size={work.batch_size}", f"--train.micro_batch_size={work.micro}",
        f"--train.activation_checkpointing={work.activation_checkpointing}", f"--devices={work.devices}",
        f"--accelerator={work.accelerator}", "--train.log_interval=1", "--train.save_interval=0",
        "--eval.interval=0", "--eval.final_validation=false", f"--seed={SEED}",
    ]  # fmt: skip
    if not work.as_shipped:
        command += [
            f"--train.learning_rate={LEARNING_RATE}", f"--train.max_norm={MAX_NORM}", "--optimizer.name=AdamW",
            f"--optimizer.weight_decay={WEIGHT_DECAY}", f"--optimizer.betas={list(BETAS)}",
            f"--precision={work.precision}", f"--compiler={work.compiler}",
        ]  # fmt: skip
    if get_config(work.model).vocab_size is None:
        command.append(f"--model_config.vocab_size={config.vocab_size}")
    command += [f"--model_config.{name}={json.dumps(value)}" for name, value in work.model_config.items()]
    command += ["--train.fp8=tensorwise"] if name == "toolkit-fp8" else []
    command += work.options
    metrics = out_dir / "logs" / "metrics.csv"
    done = run(work, name, command, folder, is_done=lambda: not work.saves and has_step(metrics, work.steps))
    return read_toolkit(metrics, done.output, work)


def run_toolkit_fp8(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run `toolkit pretrain` with the blocks' linear layers in fp8."""
    return run_toolkit(work, config, folder, python, "toolkit-fp8")


def run(
    work: Work, product: str, command: list[str], folder: Path, is_done: Callable[[], bool] = lambda: False
) -> CompletedRun:
    """Run a product with the allocator settings, device and limit of ``work``."""
    is_peer = not product.startswith("toolkit") and not work.as_shipped
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(work.devices)))).split(",")
    gpus = "" if work.accelerator == "cpu" else ",".join(visible[: work.devices])
    extra = (MALLOC if is_peer else {}) | {"CUDA_VISIBLE_DEVICES": gpus}
    if product == "litgpt" and work.compiler == "none" and not work.as_shipped:
        extra["TORCH_COMPILE_DISABLE"] = "1"
    return run_process(product, command, folder, work.threads, extra, max_seconds=work.max_seconds, is_done=is_done)


def has_step(metrics: Path, step: int) -> bool:
    """Whether metrics.csv has the complete row of a step."""
    if not metrics.is_file():
        return False
    text = metrics.read_text()
    return text.endswith("\n") and text.splitlines()[-1].startswith(f"{step},")


def read_toolkit(metrics: Path, output: str, work: Work) -> Measurement:
    """Read ``seconds`` (since the start of the run), ``tokens_per_sec`` and ``peak_memory_gb`` of each step."""
    rows = [row for row in read_csv(metrics) if row.get("loss")]
    ends = {int(row["step"]): float(row["seconds"]) for row in rows}
    measured = [row for row in rows if int(row["step"]) > work.warmup_steps]
    return Measurement(
        parameters=find_parameters(r"([\d,]+) parameters", output, "toolkit"),
        tokens_per_sec=median(float(row["tokens_per_sec"]) for row in measured),
        tokens_per_sec_end_to_end=end_to_end(ends, work),
        peak_memory_gb=float(measured[-1]["peak_memory_gb"]),
    )


def run_litgpt(work: Work, config: ModelConfig, folder: Path, python: str, *, shipped: bool = False) -> Measurement:
    """Run `litgpt pretrain` on the same chunks.

    LitGPT always compiles its model and has no option to disable it. For ``--compiler none``, TORCH_COMPILE_DISABLE
    disables torch.compile, unless ``shipped``.
    """
    out_dir = folder / "out" / ("litgpt-shipped" if shipped else "litgpt")
    optimizer = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": BETAS}
    command = [
        python, *(["-m", "litgpt"] if work.saves else ["-c", LITGPT]), "pretrain", config.name, f"--out_dir={out_dir}",
        f"--model_config={json.dumps(litgpt_config(config))}",
        "--data=LitData", f"--data.data_path={folder / 'tokens'}", "--data.num_workers=0",
        f"--train.max_tokens={work.steps * work.tokens_per_step}", f"--train.max_seq_length={work.seq_length}",
        f"--train.global_batch_size={work.batch_size}", f"--train.micro_batch_size={work.micro}",
        f"--train.tie_embeddings={str(config.tie_embeddings).lower()}", "--train.log_interval=1",
        "--train.lr_warmup_steps=1", f"--train.save_interval={10 * work.steps}",
        f"--eval.interval={10 * work.steps}", "--eval.max_iters=1", "--eval.initial_validation=false",
        "--eval.final_validation=false", "--devices=1", "--logger_name=csv", f"--seed={SEED}",
    ]  # fmt: skip
    if not work.as_shipped:
        command += [
            f"--train.max_norm={MAX_NORM}", "--optimizer",
            json.dumps({"class_path": "torch.optim.AdamW", "init_args": optimizer}), f"--precision={work.precision}",
        ]  # fmt: skip
    done = run(work, out_dir.name, command, folder)
    (metrics,) = (out_dir / "logs").rglob("metrics.csv")
    return read_litgpt(metrics, done, work)


def run_litgpt_shipped(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run LitGPT with its defaults: compiled."""
    return run_litgpt(work, config, folder, python, shipped=True)


def read_litgpt(metrics: Path, done: CompletedRun, work: Work) -> Measurement:
    """Read LitGPT's CSV log: ``iter_time``, and ``time`` since the start.

    An iteration is a micro-batch. If a step has several, ``iter_time`` is the last one's, and ``time`` is used instead.
    """
    rows, per_step = read_csv(metrics), work.batch_size // work.micro
    ends = {int(row["iter"]) // per_step: float(row["time"]) for row in rows}
    times = [float(row["iter_time"]) for row in rows if int(row["iter"]) > work.warmup_steps]
    speed = work.tokens_per_step / median(times) if per_step == 1 else end_to_end(ends, work)
    on_cuda = re.search(r"Memory Used\s*: ([\d.]+) GB", done.output)
    return Measurement(
        parameters=find_parameters(r"Total parameters: ([\d,]+)", done.output, "LitGPT"),
        tokens_per_sec=speed,
        tokens_per_sec_end_to_end=end_to_end(ends, work),
        peak_memory_gb=float(on_cuda[1]) if on_cuda else done.peak_memory_gb,
    )


def litgpt_config(config: ModelConfig) -> dict[str, Any]:
    """Return the same architecture as LitGPT config fields.

    Raises:
        UserError: LitGPT does not support the architecture.
    """
    if config.position_embedding != "rope":
        raise UserError(
            f"--model {config.name}: LitGPT does not support {config.position_embedding} positions; remove this peer"
        )
    values, default = config.to_dict(), ModelConfig()
    for name in values.keys() - LITGPT_FIELDS - LITGPT_INFERS:
        if values[name] != getattr(default, name):
            raise UserError(f"--model {config.name}: LitGPT does not support {name} {values[name]}; remove this peer")
    litgpt_values = {name: value for name, value in values.items() if name in LITGPT_FIELDS and value is not None}
    return litgpt_values | {"rope_base": int(config.rope_base)}  # an integer in LitGPT


def plain_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that benchmark_plain.py reads.

    Raises:
        UserError: The plain loop does not implement the architecture.
    """
    if config.family not in ("gpt2", "llama"):
        raise UserError(f"--model {config.name}: the plain loop implements GPT-2 and Llama only; remove this peer")
    return config.to_dict()


def run_plain(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run the plain PyTorch loop of benchmark_plain.py on the same tokens."""
    return run_worker(work, "plain", folder, python, {"config": plain_config(config)})


def run_transformers(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run transformers' Trainer on the same tokens, with benchmark_peers.py."""
    config_dir = folder / "hf"
    config_dir.mkdir(exist_ok=True)
    (config_dir / "config.json").write_text(json.dumps(family_of(config).to_hf_config(config)))
    rest = {"config_dir": str(config_dir), "out_dir": str(folder / "out" / "trainer")}
    return run_worker(work, "transformers", folder, python, rest)


WORKERS = {"plain": "benchmark_plain.py", "transformers": "benchmark_peers.py"}


def run_worker(work: Work, peer: str, folder: Path, python: str, rest: dict[str, Any]) -> Measurement:
    """Run a script that reads its settings from a file and writes the times of its steps to another."""
    settings, result = folder / f"{peer}-settings.json", folder / f"{peer}-result.json"
    equal = {
        "tokens": str(folder / "tokens.npy"), "seed": SEED, "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY, "betas": BETAS, "max_norm": MAX_NORM,
    }  # fmt: skip
    settings.write_text(json.dumps(asdict(work) | {"micro_batch_size": work.micro} | equal | rest))
    script = Path(__file__).resolve().parent / WORKERS[peer]
    done = run(work, peer, [python, str(script), str(settings), str(result)], folder)
    values = json.loads(result.read_text())
    return read_steps(values | {"peak_memory_gb": values["peak_memory_gb"] or done.peak_memory_gb}, work)


def read_steps(result: dict[str, Any], work: Work) -> Measurement:
    """Convert the recorded times to rates."""
    steps = list(zip(result["begins"], result["ends"], strict=True))[work.warmup_steps :]
    return Measurement(
        parameters=result["parameters"],
        tokens_per_sec=work.tokens_per_step / median(end - begin for begin, end in steps),
        tokens_per_sec_end_to_end=end_to_end(dict(enumerate(result["ends"], start=1)), work),
        peak_memory_gb=result["peak_memory_gb"],
    )


def end_to_end(ends: dict[int, float], work: Work) -> float:
    """Return the median tokens per second after the warm-up, from the end of each step to the end of the next."""
    gaps = [end - ends[step - 1] for step, end in ends.items() if step > work.warmup_steps]
    return work.tokens_per_step / median(gaps)


def read_csv(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def find_parameters(pattern: str, output: str, product: str) -> int:
    match = re.search(pattern, output)
    if match is None:
        raise RunFailedError(f"{product} did not print its number of parameters; its output ends:\n{tail(output)}")
    return int(match[1].replace(",", ""))


PRODUCTS: dict[str, Callable[[Work, ModelConfig, Path, str], Measurement]] = {
    "toolkit": run_toolkit,
    "litgpt": run_litgpt,
    "litgpt-shipped": run_litgpt_shipped,
    "transformers": run_transformers,
    "plain": run_plain,
    "toolkit-fp8": run_toolkit_fp8,
}
PEERS = [name for name in PRODUCTS if name != "toolkit"]
