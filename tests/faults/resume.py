"""Real weights (SmolLM2-135M) are trained for 4 steps, and again from the checkpoint of step 2; all state is compared.

On the same layout, bit for bit on each rank, right after the resume and after each later step: parameters, optimizer
tensors and options, random states, position in the data, batches, loss and gradient norm (helpers/step_records.py).

On another layout, bit for bit: the unsharded parameters and optimizer tensors right after the resume, and the batches
of each later step. Another layout sums in another order: uninterrupted runs on 1, 2 and 4 ranks differ by up to 5e-6 in
the gradient norm, and by up to 0.012 % of the movement of a tensor's weights in two steps. Ten times as much may differ
between the run and the resume.

Runs with fsdp train the first 4 of the 30 layers, to bound the time.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from helpers.processes import Forked, finish
from helpers.smollm2 import smollm2_folder

from tests.faults.core import Way
from tests.faults.states import shared
from toolkit.checkpoints.folder import read_model_config, write_model_files
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.weights import load_weights
from toolkit.data.tokenizer import Tokenizer
from toolkit.models.gpt import GPT

STEPS, SAVED = 4, 2
LAYERS = 4  # with fsdp
CLOSE, MOVED = 5e-5, 0.0012


class Subject(NamedTuple):
    """A run and its resume.

    Args:
        words: Of the command, without the base.
        first: Options of the layout of the run.
        second: Options of the layout of the resume.
    """

    words: tuple[str, ...]
    first: tuple[str, ...] = ("--devices", "1")
    second: tuple[str, ...] = ("--devices", "1")

    @property
    def n_ranks(self) -> int:
        return int(self.first[1])


LORA, FULL = ("finetune_lora", "--lora_r", "4", "--lora_dropout", "0.1"), ("finetune_full",)
FSDP2, FSDP4 = (("--devices", n, "--strategy", "fsdp") for n in "24")
SUBJECTS = {
    "LoRA": Subject(LORA),
    "full finetuning": Subject(FULL),
    "DPO": Subject((*LORA, "--objective", "DPO")),
    "fsdp on 2 ranks": Subject(FULL, FSDP2, FSDP2),
    "fsdp on 4 ranks": Subject(FULL, FSDP4, FSDP4),
    "fsdp from 2 to 4 ranks": Subject(FULL, FSDP2, FSDP4),
    "fsdp from 4 to 2 ranks": Subject(FULL, FSDP4, FSDP2),
    "fsdp to ddp": Subject(FULL, FSDP2, ("--devices", "2", "--strategy", "ddp")),
    "fsdp to one process": Subject(FULL, FSDP2),
}


def seeds(name: str, quick: bool) -> Iterable[int]:
    if quick:
        return range(name in ("LoRA", "fsdp from 2 to 4 ranks"))
    return range(4 if "fsdp" in name else 2)


def trial(name: str, seed: int, folder: Path) -> int:
    """Odd seeds save asynchronously, and seeds from 2 on in shards."""
    subject, base, first, second = SUBJECTS[name], folder / "base", folder / "first", folder / "second"
    write_base(base, LAYERS if "fsdp" in name else None)
    saving = ["--train.async_save", "true"] if seed % 2 else []
    saving += ["--fsdp.state_dict_type", "sharded"] if seed > 1 else []
    train(subject, base, first, *subject.first, *saving, "--seed", str(seed))
    checkpoint = first / f"step-{SAVED:08d}"
    train(subject, base, second, *subject.second, "--seed", str(seed), "--resume", str(checkpoint))
    if subject.first == subject.second:
        require_equal(first, second, subject.n_ranks)
    else:
        require_resharded(first, second, checkpoint)
    return 1


def write_base(folder: Path, n_layers: int | None) -> None:
    """Write SmolLM2, or its first layers, as a model folder."""
    complete = folder if n_layers is None else folder.with_name("complete")
    import_hf(smollm2_folder(), complete)
    if n_layers is not None:
        config = replace(read_model_config(complete), n_layer=n_layers)
        with torch.device("meta"):
            names = GPT(config).state_dict().keys()
        weights = {name: weight for name, weight in load_weights(complete).items() if name in names}
        tokenizer = Tokenizer.load(complete)
        folder.mkdir()
        write_model_files(folder, state_dict=weights, config=config, hyperparameters=None, tokenizer=tokenizer)


def train(subject: Subject, base: Path, out: Path, *more: str) -> None:
    command, *options = subject.words
    data, file = ("Preference", "pairs.jsonl") if "DPO" in options else ("JSON", "rows.jsonl")
    words = [command, str(base), *options, "--data", data, "--data.json_path", str(shared()[file])]
    words += ["--data.prompt_style", "plain", "--data.cache_dir", str(base.parent / "cache")]
    lengths = {"global_batch_size": 4, "micro_batch_size": 1, "max_seq_length": 32}
    lengths |= {"max_steps": STEPS, "save_interval": SAVED}
    words += [part for name, value in lengths.items() for part in (f"--train.{name}", str(value))]
    words += ["--eval.interval", "0", "--eval.final_validation", "false", "--accelerator", "cpu"]
    words += ["--callbacks", "helpers.step_records.StepRecords", "--out_dir", str(out), *more]
    process = Forked(words)
    _, errors = finish(process, 900)
    assert process.returncode == 0, errors


def require_equal(first: Path, second: Path, n_ranks: int) -> None:
    """Compare the records of all ranks, after the resume and after each later step."""
    for rank in range(n_ranks):
        saved = read(first, SAVED, rank)
        saved.pop("of the step")
        require_same(saved, read(second, "start", rank), f"after the resume, rank {rank}")
        for step in range(SAVED + 1, STEPS + 1):
            require_same(read(first, step, rank), read(second, step, rank), f"step {step}, rank {rank}")


def require_resharded(first: Path, second: Path, checkpoint: Path) -> None:
    """Compare the unsharded state right after the resume, and then batches, losses and the movement of the weights."""
    saved, resumed = read(first, SAVED), read(second, "start")
    for part in ("gathered", "groups", "position"):
        require_same({part: saved[part]}, {part: resumed[part]}, "after the resume")
    for step in range(SAVED + 1, STEPS + 1):
        batches, metrics = zip(*(read_step(out, step) for out in (first, second)), strict=True)
        assert batches[0] == batches[1], f"step {step}: other batches"
        for name, value in metrics[0].items():
            assert abs(metrics[1][name] - value) <= CLOSE * abs(value), f"step {step}, {name}: {value} is {metrics[1]}"
    before, expected, final = (load_weights(folder) for folder in (checkpoint, first / "final", second / "final"))
    for name, weight in expected.items():
        distance, movement = (float((other - weight).norm()) for other in (final[name], before[name]))
        assert distance <= MOVED * movement, f"{name} has moved by {movement}, and differs by {distance}"


def read(out: Path, when: int | str, rank: int = 0) -> dict[str, Any]:
    return json.loads((out / "records" / f"{when}-{rank}.json").read_text())


def read_step(out: Path, step: int) -> tuple[list[Any], dict[str, float]]:
    """Return the batches of all ranks, sorted by position, and the metrics."""
    paths = sorted((out / "records").glob(f"{step}-*.json"))
    records = [json.loads(path.read_text())["of the step"] for path in paths]
    return sorted(batch for record in records for batch in record["batches"]), records[0]["metrics"]


def require_same(first: dict[str, Any], second: dict[str, Any], where: str) -> None:
    for part in first.keys() | second.keys():
        a, b = first.get(part), second.get(part)
        if isinstance(a, dict) and isinstance(b, dict):
            require_same(a, b, f"{where}, {part}")
        else:
            assert a == b, f"{where}, {part}: {a} is now {b}"


WAY = Way(
    "resume",
    "a resumed finetuning of real weights has a bit-equal state and the same batches after each later step; on another "
    "layout the same unsharded state",
    "S2",
    lambda: SUBJECTS,
    seeds,
    trial,
)
