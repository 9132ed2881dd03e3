"""Foreign options and training data: valid files to damage, and their readers."""

import gzip
import json
from pathlib import Path

from tests.faults.fuzz_models import MESSAGES, changed
from tests.faults.mutate import zst
from toolkit.cli.parser import parse
from toolkit.data import LitData
from toolkit.data.sft.readers import KINDS, describe_row, find_splits
from toolkit.data.sft.schemas import parse_row
from toolkit.data.streamed.segments import BrokenFileError, plan_segments, read_part
from toolkit.data.tokens.token_store import BlockDataset, TokenStore, TokenWriter
from toolkit.errors import UserError
from toolkit.inference.batch import read_prompts
from toolkit.io.source_files import list_path

ROWS = [
    {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"conversations": [{"from": "human", "value": "é"}, {"from": "gpt", "value": "b"}]},
    {"instruction": "a", "input": "b", "output": "c"}, {"prompt": "a", "completion": "b"}, {"text": "two words"},
]  # fmt: skip


CONFIGS = {
    "own.yaml": """\
precision: bf16-true
out_dir: out
train: {max_steps: 5, learning_rate: 1e-3}
data: {class_path: SyntheticTokens, init_args: {vocab_size: 99}}
optimizer: {name: AdamW}
model_config: {n_layer: 2}
seed: 3
""",
    "litgpt.yaml": """\
model_name: pythia-14m
model_config: null
out_dir: out
precision: bf16-mixed
data: TinyStories
train:
  save_interval: 100
  global_batch_size: 4
  max_tokens: 100
eval: {interval: 10}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.1}
devices: auto
""",
    "axolotl.yaml": """\
base_model: a/b
micro_batch_size: 2
num_epochs: 1
datasets:
  - path: a
    type: alpaca
lora_r: 8
""",
    "guide.yaml": """\
training: {batch_size: 8, learning_rate: 2e-4, bf16: true}
distributed: {fsdp_sharding_strategy: shard_grad_op, fsdp_min_num_params: 5000}
""",
    "mingpt.yaml": """\
data_config: {path: a.txt, block_size: 128, train_split: 0.9}
gpt_config: {n_layer: 8, n_head: 8, n_embd: 512}
trainer_config: {max_epochs: 10, batch_size: 216, use_amp: True}
optimizer_config: {weight_decay: 0.1}
hydra: {run: {dir: a}}
""",
}


def make_options(folder: Path) -> list[str]:
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    return list(CONFIGS)


def read_options(folder: Path) -> None:
    for name in changed(folder, {name: text.encode() for name, text in CONFIGS.items()}):
        words = ["--config", str(folder / name), "--accelerator", "cpu", "--devices", "2"]
        parse("pretrain", words)


def make_rows(folder: Path) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    tables = {
        "rows.csv": 'prompt,completion\na,b\n"c, d",e\n',
        "prompts.jsonl": '{"prompt": "a"}\n{"prompt": "é", "id": 3}\n',
    }
    tables["rows.jsonl"] = "".join(json.dumps(row) + "\n" for row in ROWS)
    tables["rows.json"] = json.dumps({"train": ROWS, "val": ROWS[:1]})
    for name, text in tables.items():
        (folder / name).write_text(text)
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "a" * 50, "completion": "b"}] * 20), folder / "rows.parquet"
    )
    return [*tables, "rows.parquet"]


def read_rows(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        try:
            splits = read_prompts(str(path)) if path.stem == "prompts" else find_splits(str(path), "--data.path", KINDS)
            for source in () if path.stem == "prompts" else [*splits.train, *(splits.val or ())]:
                for number, row in source.rows():
                    for kind in ("answers", "rated", "labeled", "prompt"):
                        try:
                            parse_row(row, describe_row(source, number), kind=kind)
                        except UserError:
                            continue
        except UserError:
            continue


def make_streamed(folder: Path) -> list[str]:
    text = "".join(json.dumps({"text": f"document {i} é"}) + "\n" for i in range(40)).encode()
    files = {"a.jsonl": text, "b.jsonl.gz": gzip.compress(text), "c.jsonl.zst": zst(text), "d.txt": text}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["document"] * 100}), folder / "e.parquet", row_group_size=30)
    return [*files, "e.parquet"]


def read_streamed(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        try:
            files = list_path(str(path), "path")
            for part in (part for parts in plan_segments(files, 1000) for part in parts):
                sum(len(chunk.text) for chunk in read_part(files[part.file], part, "text"))
        except (BrokenFileError, UserError):
            continue


def make_tokens(folder: Path) -> list[str]:
    import numpy as np

    writer = TokenWriter(folder, np.uint16, with_loss_mask=True, tokens_per_chunk=100)
    writer.add(np.arange(450), np.arange(450) % 2 == 0)
    writer.finish()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def read_tokens(folder: Path) -> None:
    data = LitData(str(folder), split_names=()).prepare(tokenizer=None, max_seq_length=16)
    assert data.train[0] and data.train[len(data.train) - 1]
    rows = BlockDataset(TokenStore(folder), 17)
    assert all(rows[i] for i in range(len(rows)))
