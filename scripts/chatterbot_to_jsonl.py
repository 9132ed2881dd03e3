"""Write the English conversations of the package chatterbot-corpus as instruction data, for tutorials and tests.

    pip install chatterbot-corpus
    python scripts/chatterbot_to_jsonl.py chatterbot.jsonl
    python scripts/chatterbot_to_jsonl.py trivia.jsonl --topics trivia science --form prompt

About 900 short questions with answers, by topic (BSD licence). One conversation per line, its turns taken by user and
assistant: {"messages": [{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "completion": ...} of its first two.
The package repeats many (tech_support is ten conversations, a hundred times each); repeats are left out, for a repeat
among the held-out rows would be known from training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml


def conversations(topics: list[str] | None = None) -> Iterator[list[str]]:
    """Yield conversations of two or more turns, file by file; a last question without answer is cut off."""
    folder = files("chatterbot_corpus") / "data" / "english"
    names = {entry.name.removesuffix(".yml"): entry for entry in folder.iterdir() if entry.name.endswith(".yml")}
    for topic in topics or sorted(names):
        if topic not in names:
            raise SystemExit(f"--topics {topic}: must be among {', '.join(sorted(names))}")
        for turns in yaml.safe_load(names[topic].read_text(encoding="utf-8"))["conversations"]:
            # A few turns are numbers, dates or lists in YAML's eyes; they are left out with all that follows them.
            texts = [turn.strip() if isinstance(turn, str) else "" for turn in turns]
            good = texts.index("") if "" in texts else len(texts)
            if good >= 2:
                yield texts[: good // 2 * 2]


def to_row(turns: list[str], form: str) -> dict[str, object]:
    """One conversation as a row of the chosen form."""
    if form == "prompt":
        return {"prompt": turns[0], "completion": turns[1]}
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write(path: Path, form: str = "messages", topics: list[str] | None = None) -> int:
    """Write the rows, each once, and return their number."""
    rows = list(dict.fromkeys(json.dumps(to_row(turns, form), ensure_ascii=False) for turns in conversations(topics)))
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--form", choices=["messages", "prompt"], default="messages", help="the columns of a row")
    parser.add_argument("--topics", nargs="+", help="only these, such as trivia science")
    arguments = parser.parse_args()
    print(f"{arguments.path}: {write(arguments.path, arguments.form, arguments.topics):,} rows")
