"""Kinds of runs, all small: each is one command, and two of its results are compared bit for bit."""

import os
import shutil
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from helpers.processes import Forked, finish

from tests.faults.inputs import cache_flags, data_flags, shared
from tests.faults.values import metrics_of, require_same, values_of
from toolkit.checkpoints.store import complete_checkpoints


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Kind(NamedTuple):
    """A kind of run.

    Args:
        words: Of the command, before data and lengths.
        data: Name of its data: text, rows, pairs, rated, streamed or mixture.
        n_ranks: Number of processes.
        options: Further options.
        is_remote: Whether out_dir is a URL.
        has_own_cache: Whether each run prepares its data itself, which a fault may meet; streamed data always does.
    """

    words: tuple[str, ...] = ("pretrain", "pico-llama")
    data: str = "text"
    n_ranks: int = 1
    options: tuple[str, ...] = ()
    is_remote: bool = False
    has_own_cache: bool = False


TWO = ("--devices", "2")
FSDP = (*TWO, "--strategy", "fsdp")
SHARDED = (*FSDP, "--fsdp.state_dict_type", "sharded")
LORA = ("finetune_lora", "{base}", "--lora_r", "2")
DPO = (*LORA, "--objective", "DPO")
KINDS = {
    "ordinary": Kind(),
    "async": Kind(options=("--train.async_save", "true")),
    "adapters": Kind(LORA, "rows"),
    "full finetuning": Kind(("finetune_full", "{base}"), "rows"),
    "dpo": Kind(DPO, "pairs"),
    "dpo with reference": Kind((*DPO, "--objective.reference_dir", "{base}"), "pairs", has_own_cache=True),
    "kto": Kind((*LORA, "--objective", "KTO"), "rated"),
    "distillation": Kind(
        (*Kind().words, "--objective", "Distillation", "--objective.teacher_dir", "{base}"), has_own_cache=True
    ),
    "muon": Kind(options=("--optimizer.name", "Muon")),
    "bf16 moments": Kind(options=("--optimizer.state_dtype", "bf16")),
    "ema": Kind(options=("--train.ema", "0.8")),
    "ema sharded": Kind(n_ranks=2, options=(*SHARDED, "--train.ema", "0.8", "--train.async_save", "true")),
    "streamed": Kind(data="streamed"),
    "streamed workers": Kind(data="streamed", options=("--data.num_workers", "2")),
    "mixture": Kind(data="mixture"),
    "remote": Kind(is_remote=True),
    "fsdp": Kind(n_ranks=2, options=FSDP),
    "sharded": Kind(n_ranks=2, options=SHARDED),
    "async sharded": Kind(n_ranks=2, options=(*SHARDED, "--train.async_save", "true")),
    "tensor parallel": Kind(n_ranks=2, options=(*TWO, "--tensor_parallel_size", "2")),
    "context parallel": Kind(n_ranks=2, options=(*TWO, "--context_parallel_size", "2")),
    "pipeline": Kind(n_ranks=2, options=(*TWO, "--pipeline_parallel_size", "2", "--train.micro_batch_size", "2")),
}
QUICK_KINDS = {"ordinary", "adapters", "streamed", "sharded"}
"""Of the short form, which has no time to make references of all kinds."""


def cache_of(kind: str, out: Path) -> Path:
    """Return the data cache of a run, whose name begins with out's if the run writes there while it trains."""
    is_own = KINDS[kind].has_own_cache or KINDS[kind].data in ("streamed", "mixture")
    return out.with_name(f"{out.name}.cache") if is_own else shared()["folder"] / "cache"


def command(kind: str, out: Path, *more: str) -> list[str]:
    """Return the words of a run of 6 steps with 2 checkpoints and a validation; it resumes by itself."""
    spec, files = KINDS[kind], shared()
    words = [word.format(base=files["base"]) for word in spec.words]
    data = [*data_flags(spec.data), *cache_flags(spec.data, cache_of(kind, out))]
    lengths = {"global_batch_size": 4, "micro_batch_size": 1, "max_seq_length": 32, "max_steps": 6, "save_interval": 2}
    flags = [part for name, value in lengths.items() for part in (f"--train.{name}", str(value))]
    flags += ["--train.keep_last", "2", "--train.log_interval", "1", "--eval.interval", "3"]
    flags += ["--accelerator", "cpu", "--resume", "auto"]
    folders = ["--out_dir", str(out)]
    if spec.is_remote:
        folders = ["--out_dir", f"file://{out}", "--staging_dir", f"{out}.staging"]
    line, more = [*words, *data, *flags, *folders], (*spec.options, *more)
    for flag in (word for word in more if word.startswith("--") and word in line):  # given twice, it would be reported
        at = line.index(flag)
        del line[at : at + 2]
    return [*line, *more]


def run(kind: str, out: Path, *more: str, **environ: str) -> Result:
    """Run to its end, whatever it is."""
    process = Forked(command(kind, out, *more), **environ)
    texts = finish(process)
    return Result(process.returncode, *texts)


@cache
def undisturbed(kind: str) -> Path:
    """Return the out_dir of an undisturbed run, which the first process of this commit makes."""
    folder = shared()["folder"] / "runs" / kind.replace(" ", "-")
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        result = run(kind, new / "out")
        assert result.code == 0, result.err
        begin = time.monotonic()
        assert run(kind, new / "again").code == 0  # the first one has prepared the data and started a server
        (new / "seconds").write_text(str(time.monotonic() - begin))
        try:
            new.rename(folder)
        except OSError:
            shutil.rmtree(new)
    return folder / "out"


def seconds(kind: str) -> float:
    """Return the duration of an undisturbed run."""
    return float((undisturbed(kind).parent / "seconds").read_text())


def require_same_result(kind: str, out: Path, saves_more: bool = False, has_log: bool = True) -> None:
    """Compare a finished run with the undisturbed one: every value of the end and of the metrics but times.

    All checkpoints must be there, too. ``saves_more``: a signal has saved one, or one was damaged, so that others may
    be kept. ``has_log``: metrics.csv was not damaged.
    """
    require_same_run(out, undisturbed(kind), saves_more, has_log)


def require_same_run(out: Path, expected: Path, saves_more: bool = False, has_log: bool = True) -> None:
    """Compare two out_dirs; see :func:`require_same_result`."""
    if has_log:
        require_same(metrics_of(out), metrics_of(expected))
    require_same(values_of(out / "final"), values_of(expected / "final"))
    names = [{name for name, _ in complete_checkpoints(folder)} for folder in (out, expected)]
    assert saves_more or names[0] == names[1], f"checkpoints {names[0]} instead of {names[1]}"
    left = [path.name for path in out.iterdir() if path.name.startswith(".tmp")]
    assert not left, f"temporary files are left: {left}"


def require_intact(out: Path) -> None:
    """Check that every complete checkpoint loads."""
    for _, folder in complete_checkpoints(out):
        values_of(folder)


def require_one_line(result: Result) -> None:
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("toolkit "), f"stderr is not one line: {result.err[-500:]}"


def require_named_line(result: Result, *texts: str) -> None:
    """Require one line that ends the command, with these texts."""
    assert result.code in (1, 2, 3), f"exit code {result.code}: {result.err[-500:]}"
    require_one_line(result)
    assert all(text in result.err for text in texts), f"{result.err.strip()} has not all of {texts}"
