"""Inputs of small runs: flags of the corpus, and a random base model with rows to finetune it on."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from helpers.initialize import initialize
from toolkit.checkpoints.folder import write_model_files
from toolkit.data.tokenizer import train_bpe
from toolkit.models.families import get_config
from toolkit.models.gpt import build_model


def text_data(corpus: Path) -> list[str]:
    """Return the flags that train on the corpus with a tokenizer of 300 tokens."""
    return ["--data", "TextFiles", "--data.train_data_path", str(corpus), "--data.vocab_size", "300"]


def write_base(
    folder: Path, corpus: Path, vocab_size: int = 300, companions: Mapping[str, str] | None = None, **config
) -> Path:
    """Write a random pico-llama with a tokenizer of the corpus; ``companions`` are further files of the tokenizer."""
    tokenizer = train_bpe([file.read_text() for file in sorted(corpus.iterdir())], vocab_size)
    tokenizer = tokenizer.with_files({name: text.encode() for name, text in (companions or {}).items()})
    model = build_model(replace(get_config("pico-llama"), **config).with_vocab_size(tokenizer.vocab_size))
    initialize(model, seed=3)
    state = model.state_dict()
    write_model_files(folder, state_dict=state, config=model.config, hyperparameters=None, tokenizer=tokenizer)
    return folder


def write_rows(folder: Path) -> Path:
    """Write 30 prompts with answers of different lengths."""
    rows = [{"prompt": f"token {i}", "completion": "reads a line " * (1 + i % 4)} for i in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"
