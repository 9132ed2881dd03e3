"""Inputs of all runs of a commit: text, rows, a base model, and the flags of the data that they are."""

import json
import os
import random
import shutil
from functools import cache
from pathlib import Path

from helpers.corpus import WORDS
from helpers.small_runs import text_data, write_base, write_rows

from tests.faults.core import ROOT, commit

SHARED = ROOT / "build" / "faults"


@cache
def shared() -> dict[str, Path]:
    """Return the inputs of all runs of this commit, which the first process writes."""
    folder = SHARED / commit()
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        (new / "text").mkdir(parents=True)
        words = random.Random(0)
        for i in range(4):
            text = " ".join(words.choice(WORDS) for _ in range(4000))
            (new / "text" / f"{i}.txt").write_text(text)
        (new / "base").mkdir()
        write_base(new / "base", new / "text")
        write_rows(new)
        pairs = [{"prompt": f"token {i}", "chosen": "the next " * (1 + i % 3), "rejected": "a line"} for i in range(30)]
        (new / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        rated = [{"prompt": f"token {i}", "completion": "next " * (1 + i % 3), "label": i % 2 == 0} for i in range(30)]
        (new / "rated.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rated))
        pages = [{"text": " ".join(words.choice(WORDS) for _ in range(20))} for _ in range(100)]
        (new / "pages.jsonl").write_text("".join(json.dumps(page) + "\n" for page in pages))
        try:
            new.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(new)
    names = ("text", "base", "rows.jsonl", "pairs.jsonl", "rated.jsonl", "pages.jsonl")
    return {name: folder / name for name in names} | {"folder": folder}


def data_flags(name: str) -> list[str]:
    """Return the flags of the data, without its cache."""
    files = shared()
    plain, pages = ["--data.prompt_style", "plain"], str(files["pages.jsonl"])
    streamed = ["--tokenizer_dir", str(files["base"]), "--data.path", pages]
    streamed += ["--data.val_path", str(files["text"] / "0.txt"), "--data.val_rows", "8"]
    text = {"class_path": "TextFiles", "init_args": {"train_data_path": str(files["text"]), "vocab_size": 300}}
    more = {"class_path": "HuggingFaceText", "init_args": {"path": pages, "val_rows": 4}}
    sources = {"a": {"weight": 0.75, "data": text}, "b": {"weight": 0.25, "data": more}}
    return {
        "text": text_data(files["text"]),
        "rows": ["--data", "JSON", "--data.json_path", str(files["rows.jsonl"]), *plain],
        "pairs": ["--data", "Preference", "--data.json_path", str(files["pairs.jsonl"]), *plain],
        "rated": ["--data", "Preference", "--data.json_path", str(files["rated.jsonl"]), *plain],
        "streamed": ["--data", "helpers.short_segments.ShortSegments", *streamed],
        "mixture": ["--data", "Mixture", "--data.sources", json.dumps(sources)],
    }[name]


def cache_flags(name: str, cache: Path) -> list[str]:
    """Return the flags that place the cache of the data."""
    options = ("sources.a.data.", "sources.b.data.") if name == "mixture" else ("",)
    return [part for option in options for part in (f"--data.{option}cache_dir", str(cache))]
