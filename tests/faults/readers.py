"""The commands that read a model, all run in one process: each refuses damaged files.

As a script it runs commands, a JSON list of words for each, and prints (code, out, err) of each as JSON.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

from helpers.processes import Forked, finish

from toolkit import cli

Words = list[str]
CPU = ["--accelerator", "cpu"]
GREEDY = ["--prompt", "token", "--max_new_tokens", "8", "--temperature", "0", *CPU]
READERS: dict[str, Callable[[str, str], Words]] = {
    "generate": lambda model, out: ["generate", model, *GREEDY],
    "evaluate": lambda model, out: ["evaluate", model, *CPU],
    "convert_to_hf": lambda model, out: ["convert_to_hf", model, f"{out}/hf"],
    "convert_to_gguf": lambda model, out: ["convert_to_gguf", model, f"{out}/model.gguf"],
    "convert_to_litgpt": lambda model, out: ["convert_to_litgpt", model, f"{out}/litgpt"],
    "average": lambda model, out: ["average", f"{out}/average", "--checkpoint_dirs", f"{model},{model}"],
    "pretrain": lambda model, out: [
        *("pretrain", "--initial_checkpoint_dir", model, "--data", "SyntheticTokens", "--data.vocab_size", "300", *CPU),
        *("--train.max_steps", "1", "--train.global_batch_size", "1", "--train.max_seq_length", "32"),
        *("--out_dir", f"{out}/run"),
    ],
    "serve": lambda model, out: ["serve", model, "--port", "0", *CPU],
}
"""By name; serve, which would not end, is the last."""
ADAPTERS: dict[str, Callable[[str, str], Words]] = {
    "merge_lora": lambda model, out: ["merge_lora", model, "--out_dir", f"{out}/merged"],
    "convert_to_peft": lambda model, out: ["convert_to_peft", model, f"{out}/peft"],
    "convert_to_hf merge": lambda model, out: ["convert_to_hf", model, f"{out}/hf", "--merge", "true"],
    "generate": READERS["generate"],
    "evaluate": READERS["evaluate"],
    "serve": READERS["serve"],
}
SHARDS = {"consolidate": lambda model, out: ["consolidate", model, f"{out}/whole"], "generate": READERS["generate"]}


def readers_of(model: Path) -> dict[str, Callable[[str, str], Words]]:
    """Return the commands that read such a model, by name."""
    if (model / "lit_model.pth.lora").exists():
        return ADAPTERS
    return SHARDS if (model / "lit_model.pth").is_dir() else READERS


def run_here(commands: list[Words]) -> list[tuple[int, str, str]]:
    """Run commands in this process; return (code, out, err) of each."""
    results = []
    for words in commands:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = cli.main(words)
        results.append((code, out.getvalue(), err.getvalue()))
    return results


def run_forked(commands: list[Words]) -> list[tuple[int, str, str]]:
    """As :func:`run_here`, in another process. A server that starts would not end: it fails."""
    process = Forked([json.dumps(commands)], script=Path(__file__), n_ranks=1)
    out, err = finish(process, 120)
    assert process.returncode == 0, f"exit code {process.returncode}: {err[-600:]}"
    return [tuple(result) for result in json.loads(out)]


if __name__ == "__main__":
    print(json.dumps(run_here(json.loads(sys.argv[1]))))
