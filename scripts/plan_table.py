"""Write the table "what fits, how fast" of README.md, from `toolkit plan` and from what one H100 measured.

python scripts/plan_table.py
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"
# Method, command, and what tutorials/performance.md measured with these settings: memory in GB, tokens/s.
LLAMA = "finetune_lora meta-llama/Llama-3.1"
GPT2 = "gpt2 --train.global_batch_size 64 --train.micro_batch_size 32"
TINY = "tiny-llama-1.1b --train.global_batch_size 32 --train.micro_batch_size 8"
ROWS = [
    ("pretrain", f"pretrain {GPT2} --compiler torch --speed H100", (14.3, 463_605)),
    ("pretrain", f"pretrain {TINY} --compiler torch --speed H100", (45.9, 71_869)),
    ("QLoRA", f"{LLAMA}-8B --quantize bnb.nf4 --train.max_seq_length 2048 --speed 4090", None),
    ("LoRA", f"{LLAMA}-8B --train.max_seq_length 4096 --speed H100", None),
    ("all weights", "finetune_full meta-llama/Llama-3.1-8B --train.max_seq_length 4096 --devices 8 --speed H100", None),
    ("QLoRA", f"{LLAMA}-70B --quantize bnb.nf4 --train.max_seq_length 2048 --speed H200", None),
]
HEAD = (
    "| method | model | GPUs | tokens per row | memory per GPU | tokens/s per GPU | measured |\n"
    "|---|---|---|---:|---:|---:|---|\n"
)


def plan(command: str) -> dict:
    """Return the plan of a command, as on a machine without a GPU."""
    words = [sys.executable, "-m", "toolkit", "plan", *shlex.split(command), "--format", "json"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return json.loads(subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout)


def table() -> str:
    """Return the table as Markdown."""
    lines = []
    for method, command, measured in ROWS:
        values = plan(command)
        speed, n = values["speed"], values["devices"]
        cells = [method, values["model"], f"{n} x {speed['gpu']}", f"{values['max_seq_length']:,}"]
        cells += [f"{values['memory_gb']['total']:.0f} GB", f"{round(speed['tokens_per_sec'] / n, -2):,.0f}"]
        cells.append("{:.0f} GB, {:,}".format(*measured) if measured else "no")
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines)


def replace_table(text: str, new: str) -> str:
    """Return the page with the table in place of the one that has the same first cell."""
    return re.sub(r"\| method \|.*?\n(?!\|)", lambda _: new, text, count=1, flags=re.S)


if __name__ == "__main__":
    README.write_text(replace_table(README.read_text(), table()))
