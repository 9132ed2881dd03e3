"""Run the products that scripts/benchmark.py compares, and read their figures.

Each run is a process of the real product in a folder with ``tokens`` (LitData) and ``tokens.npy``.
"""

import csv
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import family_of, get_config

SEED, LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_NORM = 42, 4e-4, 0.1, (0.9, 0.95), 1.0

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

# The glibc settings of disable_malloc_trim in toolkit/distributed/memory.py, for the peers.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "LITDATA_DISABLE_VERSION_CHECK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Work:
    """The workload of a run.

    ``model_config``: fields that override the named architecture. ``as_shipped``: use each product's defaults, except
    for model, tokens, batch and steps.
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


@dataclass
class CompletedRun:
    """The output and peak memory (GB) of a successful process."""

    output: str
    peak_memory_gb: float


class RunFailedError(RuntimeError):
    """A product failed; the message contains the end of its output."""


def run_toolkit(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run `toolkit pretrain` and read its logs/metrics.csv."""
    out_dir = folder / "toolkit"
    command = [
        python, "-m", "toolkit", "pretrain", work.model, f"--out_dir={out_dir}",
        "--data=LitData", f"--data.data_path={folder / 'tokens'}", "--data.split_names=null", "--data.num_workers=0",
        f"--train.max_steps={work.steps}", f"--train.max_seq_length={work.seq_length}",
        f"--train.global_batch_size={work.batch_size}", f"--train.micro_batch_size={work.batch_size}",
        "--train.log_interval=1", "--train.save_interval=0", "--eval.interval=0", "--eval.final_validation=false",
        f"--seed={SEED}",
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
    done = run_process("toolkit", command, folder, work.threads, {})
    return read_toolkit(out_dir / "logs" / "metrics.csv", done.output, work)


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
    out_dir = folder / ("litgpt-shipped" if shipped else "litgpt")
    optimizer = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": BETAS}
    command = [
        python, "-m", "litgpt", "pretrain", config.name, f"--out_dir={out_dir}",
        f"--model_config={json.dumps(litgpt_config(config))}",
        "--data=LitData", f"--data.data_path={folder / 'tokens'}", "--data.num_workers=0",
        f"--train.max_tokens={work.steps * work.tokens_per_step}", f"--train.max_seq_length={work.seq_length}",
        f"--train.global_batch_size={work.batch_size}", f"--train.micro_batch_size={work.batch_size}",
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
    eager = {} if shipped or work.as_shipped or work.compiler == "torch" else {"TORCH_COMPILE_DISABLE": "1"}
    done = run_process(out_dir.name, command, folder, work.threads, eager | peer_allocator(work))
    (metrics,) = (out_dir / "logs").rglob("metrics.csv")
    return read_litgpt(metrics, done, work)


def run_litgpt_shipped(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run LitGPT with its defaults: compiled."""
    return run_litgpt(work, config, folder, python, shipped=True)


def read_litgpt(metrics: Path, done: CompletedRun, work: Work) -> Measurement:
    """Read LitGPT's CSV log: ``iter_time``, and ``time`` since the start. One iteration is one step."""
    rows = read_csv(metrics)
    ends = {int(row["iter"]): float(row["time"]) for row in rows}
    times = [float(row["iter_time"]) for row in rows if int(row["iter"]) > work.warmup_steps]
    on_cuda = re.search(r"Memory Used\s*: ([\d.]+) GB", done.output)
    return Measurement(
        parameters=find_parameters(r"Total parameters: ([\d,]+)", done.output, "LitGPT"),
        tokens_per_sec=work.tokens_per_step / median(times),
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


def run_transformers(work: Work, config: ModelConfig, folder: Path, python: str) -> Measurement:
    """Run transformers' Trainer on the same tokens, with benchmark_peers.py."""
    config_dir, settings, result = folder / "hf", folder / "settings.json", folder / "result.json"
    config_dir.mkdir(exist_ok=True)
    (config_dir / "config.json").write_text(json.dumps(family_of(config).to_hf_config(config)))
    settings.write_text(
        json.dumps(
            asdict(work) | {
                "config_dir": str(config_dir), "out_dir": str(folder / "trainer"),
                "tokens": str(folder / "tokens.npy"), "seed": SEED, "learning_rate": LEARNING_RATE,
                "weight_decay": WEIGHT_DECAY, "betas": BETAS, "max_norm": MAX_NORM,
            }
        )
    )  # fmt: skip
    worker = Path(__file__).resolve().parent / "benchmark_peers.py"
    command = [python, str(worker), str(settings), str(result)]
    run_process("transformers", command, folder, work.threads, peer_allocator(work))
    return read_transformers(json.loads(result.read_text()), work)


def peer_allocator(work: Work) -> dict[str, str]:
    """Return the variables that make glibc keep freed memory as in toolkit; empty if products run as shipped."""
    return {} if work.as_shipped else MALLOC


def read_transformers(result: dict[str, Any], work: Work) -> Measurement:
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
}
PEERS = [name for name in PRODUCTS if name != "toolkit"]


RUNNING: list[int] = []
"""Process IDs of the running products."""


def take_turns(runs: Collection[Future[Measurement]], seconds: float) -> None:
    """Alternate between the products every ``seconds``, pausing the others, until all runs end.

    If ``seconds`` cover several steps, the pauses do not affect a product's median step.
    """
    try:
        while not all(run.done() for run in runs):
            for pid in RUNNING[:] or [0]:  # 0: none has started yet
                end = time.monotonic() + seconds
                while pid in (*RUNNING, 0) and time.monotonic() < end:
                    for process in RUNNING[:]:
                        send_signal(process, signal.SIGCONT if process == pid else signal.SIGSTOP)
                    time.sleep(0.05)
                    if not pid:
                        break
    except BaseException:
        for process in RUNNING[:]:
            send_signal(process, signal.SIGKILL)
        raise


def send_signal(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(process, number)


def run_process(product: str, command: list[str], folder: Path, threads: int, extra: dict[str, str]) -> CompletedRun:
    """Run a product in ``folder`` and wait for it.

    Raises:
        UserError: toolkit reported a user error (exit code 2).
        RunFailedError: The process failed.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in MALLOC and k != "PYTHONPATH"}
    environment = inherited | QUIET | {"OMP_NUM_THREADS": str(threads)} | extra
    log = folder / f"{product}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        RUNNING.append(process.pid)
        try:
            # wait4: getrusage(RUSAGE_CHILDREN) would return the maximum over all children so far.
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        finally:
            RUNNING.remove(process.pid)
    process.returncode = os.waitstatus_to_exitcode(status)
    output = log.read_text(errors="replace")
    if process.returncode == 2 and product == "toolkit":
        raise UserError(output.strip().splitlines()[-1])
    if process.returncode:
        raise RunFailedError(f"{product} failed with exit code {process.returncode}; its output ends:\n{tail(output)}")
    return CompletedRun(output, rss_gb(usage))


def rss_gb(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def tail(output: str, lines: int = 15) -> str:
    return "\n".join(output.splitlines()[-lines:])
