"""Write the English conversations of the package chatterbot-corpus as instruction data, for tutorials and tests.

    pip install chatterbot-corpus
    python scripts/chatterbot_to_jsonl.py chatterbot.jsonl
    python scripts/chatterbot_to_jsonl.py trivia.jsonl --topics trivia science --form prompt

About 900 short questions with answers, by topic (BSD license). Each line is one conversation:
{"messages": [{"role": ..., "content": ...}, ...]}, or {"prompt": ..., "completion": ...} of its first two turns.
Duplicates are removed (tech_support repeats ten conversations a hundred times each), so that held-out rows are not in
the training data.
"""

import argparse
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml


def conversations(topics: list[str] | None = None) -> Iterator[list[str]]:
    """Yield conversations of two or more turns; a last question without an answer is dropped."""
    folder = files("chatterbot_corpus") / "data" / "english"
    names = {entry.name.removesuffix(".yml"): entry for entry in folder.iterdir() if entry.name.endswith(".yml")}
    for topic in topics or sorted(names):
        if topic not in names:
            raise SystemExit(f"--topics {topic}: must be among {', '.join(sorted(names))}")
        for turns in yaml.safe_load(names[topic].read_text(encoding="utf-8"))["conversations"]:
            # YAML parses a few turns as numbers, dates or lists; drop them and all later turns.
            texts = [turn.strip() if isinstance(turn, str) else "" for turn in turns]
            n_valid = texts.index("") if "" in texts else len(texts)
            if n_valid >= 2:
                yield texts[: n_valid // 2 * 2]


def to_row(turns: list[str], form: str) -> dict[str, object]:
    """Convert a conversation to a row of the given form."""
    if form == "prompt":
        return {"prompt": turns[0], "completion": turns[1]}
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def write(path: Path, form: str = "messages", topics: list[str] | None = None) -> int:
    """Write the unique rows and return their number."""
    rows = list(dict.fromkeys(json.dumps(to_row(turns, form), ensure_ascii=False) for turns in conversations(topics)))
    path.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return len(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the file to write")
    parser.add_argument("--form", choices=["messages", "prompt"], default="messages", help="the columns of a row")
    parser.add_argument("--topics", nargs="+", help="topics to include, such as trivia science; default all")
    arguments = parser.parse_args()
    print(f"{arguments.path}: {write(arguments.path, arguments.form, arguments.topics):,} rows")
