"""`toolkit plan`, ``--dry_run`` and the run have one configuration, down to the steps and the learning rate."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from helpers.cases import check_each
from helpers.small_runs import write_base, write_rows
from toolkit_plan import by_memory, plan
from toolkit_plan.rows import UnpreparedRows

from toolkit.cli import dispatch, main
from toolkit.data import PythonStdlib
from toolkit.data.text import prepare_text, python_stdlib
from toolkit.data.tokenizer import Tokenizer
from toolkit.data.tokens.token_store import TokenWriter
from toolkit.distributed.run_group import RunGroup
from toolkit.distributed.world import WorldInfo
from toolkit.errors import UserError
from toolkit.models.families import get_config
from toolkit.planning import data
from toolkit.planning.resolve import ResolvedConfig
from toolkit.training import engine, launch

ROOT = Path(__file__).parents[3]


@contextmanager
def one_process(fabric: Any, world: WorldInfo, timeouts: Any) -> Iterator[RunGroup]:
    """The processes of a run, as its first process sees them; no other is started."""
    group = RunGroup(fabric, WorldInfo(1, 1, 0, 0, "toolkit", starts_processes=False), timeouts)
    group.init_process_group = lambda: None
    yield group


def resolutions(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, ResolvedConfig | str]:
    """Return the configuration of the plan, the dry run and the run, or the line that refuses it. Nothing is built."""
    found: dict[str, Any] = {}

    def stop_run(config: ResolvedConfig, device: Any) -> None:
        found["config"] = resolve_compiler(config, device)
        raise UserError("resolved")

    def keep_plan(*args: Any) -> plan.RunPlan:
        found["plan"] = plan_with_data(*args)
        return found["plan"]

    def stop_plan(*args: Any) -> None:
        if missing := missing_parts(*args):
            raise UserError(missing[0])
        name, reason = found["plan"].compiler
        config = found["plan"].config
        reasons = {**config.reasons, "compiler": reason} if reason else config.reasons
        found["config"] = replace(config, args=replace(config.args, compiler=name), reasons=reasons)
        raise UserError("resolved")

    resolve_compiler, plan_with_data, missing_parts = engine.resolve_compiler, plan.plan_with_data, plan.missing_parts
    paths = {"run": words, "plan": ["plan", *words], "dry run": [*words, "--dry_run"]}
    configs: dict[str, ResolvedConfig | str] = {}
    with (
        mock.patch.object(dispatch, "report_failure", lambda error, text, code, report: report("")),
        mock.patch.object(launch, "launch_processes", one_process),
        mock.patch.object(engine, "resolve_compiler", stop_run),
        mock.patch.object(plan, "plan_with_data", keep_plan),
        mock.patch.object(plan, "missing_parts", stop_plan),
        mock.patch.object(plan, "plan_memory", lambda *_: None),  # takes longest
    ):
        for path, argv in paths.items():
            found.clear()
            with mock.patch.dict("os.environ"):  # a run tells its processes about the node
                assert main(argv) == 2
            line = capsys.readouterr().err.splitlines()[-1]
            configs[path] = found.get("config") or line.partition(": ")[2]
    return configs


def values(config: ResolvedConfig) -> dict[str, Any]:
    """Return the fields of the configuration and of its options; only the flag --dry_run may differ."""
    of_args = vars(replace(config.args, dry_run=False))
    return {field.name: getattr(config, field.name) for field in fields(config)} | of_args | {"requested": None}


def require_same(words: str, capsys: pytest.CaptureFixture[str]) -> ResolvedConfig | str:
    found = resolutions([*words.split(), "--accelerator", "cpu"], capsys)
    run = found.pop("run")
    for path, config in found.items():
        if isinstance(run, str) or isinstance(config, str):
            assert config == run, path
            continue
        differing = [name for name, value in values(config).items() if name != "args" and value != values(run)[name]]
        assert not differing, (path, {name: (values(config)[name], values(run)[name]) for name in differing})
    return run


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder: texts, chunks, rows, a checkpoint, and the recipes' tokenizers."""
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "data/text"
    texts.mkdir(parents=True)
    for part in range(4):
        (texts / f"{part}.txt").write_text("".join(f"Line {i} of text {part}.\n" for i in range(3000)))
    monkeypatch.setattr(python_stdlib, "find_sources", lambda: sorted(texts.iterdir()))
    for split in ("train", "val"):
        writer = TokenWriter(tmp_path / "chunks" / split, np.uint16)
        writer.add(np.arange(1_000_000) % 300)
        writer.finish()
        (tmp_path / "data/tokens").mkdir(exist_ok=True)
        (tmp_path / "chunks" / split / "tokens").rename(tmp_path / "data/tokens" / split)
    (tmp_path / "base").mkdir()
    base = write_base(tmp_path / "base", texts, block_size=1024)
    names = ["meta-llama/Llama-2-7b-hf", "EleutherAI/pythia-160m", "HuggingFaceTB/SmolLM2-135M"]
    for name in [*names, "TinyLlama/TinyLlama_v1.1"]:
        Tokenizer.load(base).save(tmp_path / "checkpoints" / name)
    write_rows(tmp_path)
    return tmp_path


SHORT = "--train.max_seq_length 64"
TEXT = "--data TextFiles --data.train_data_path data/text --data.vocab_size 300"
ROWS = "--data.json_path rows.jsonl --data.prompt_style alpaca --train.global_batch_size 4"


def test_plan_dry_run_and_run_are_one(folder, capsys):
    def check(words: str, steps: int | None, refusal: str = "") -> None:
        config = require_same(words, capsys)
        if refusal:
            assert isinstance(config, str) and refusal in config, config
        else:
            assert isinstance(config, ResolvedConfig) and config.steps == steps, config

    small = f"pretrain pico-llama {SHORT}"
    check_each(check, [
        (f"pretrain pythia-14m {SHORT} --devices 4 --num_nodes 1 --fsdp.accumulate unsharded --compiler auto", 77),
        (f"{small} {TEXT} --train.epochs 2 --devices 2", 49),
        (f"{small} {TEXT} --train.max_tokens 1e5", 25),
        (f"{small} {TEXT} --train.max_steps 10 --train.lr_warmup_steps 20", None, "must be at most the 10 steps"),
        (f"{small} {TEXT} --train.global_batch_size 10000", None, "the training data has only"),
        (f"{small} --data LitData --data.data_path data/tokens --train.epochs 1", 241),
        (f"pretrain gpt-mini {SHORT} --data CharText --data.path data/text/0.txt --train.epochs 1", 14),
        (f"{small} {TEXT} --data.vocab_size characters --train.max_time 5", None),
        (f"finetune_full base {ROWS}", 21),
        (f"finetune_lora base {ROWS} --train.max_tokens 1000", 2),
    ])  # fmt: skip


def test_a_plan_of_data_that_is_not_prepared_prints_no_steps_or_an_estimate(folder, capsys):
    """And it prepares nothing."""

    def check(words: str, *lines: str) -> None:
        assert main(["plan", *words.split(), "--accelerator", "cpu", "--data.cache_dir", "cache"]) == 0
        shown = capsys.readouterr().out
        assert not Path("cache").exists() and "Not yet complete" not in shown
        assert all(re.search(line, shown) for line in lines), shown

    later, unknown = "not prepared yet\n", "Length     known when the data is prepared"
    check_each(check, [
        (f"pretrain pico-llama {SHORT}", r"Data       PythonStdlib: about \d+ training rows, " + later),
        (f"pretrain pico-llama {SHORT} {TEXT} --train.epochs 1", f"Data       TextFiles: {later}", unknown),
        (f"pretrain pico-llama {SHORT} {TEXT} --train.max_tokens 4096e2", "Length     100 steps\n"),
        (f"pretrain gpt-mini {SHORT} --data CharText --data.path data/text/0.txt --train.epochs 1", unknown),
        ("pretrain pico-llama --data TinyStories --train.max_steps 3", "TinyStories: streamed\n", "3 steps\n"),
        ("finetune_full base --data Alpaca2k", f"Alpaca2k: about 1,900 training rows, {later}", r"about \d+ steps\n"),
    ])  # fmt: skip


def test_a_plan_hashes_no_large_text(folder, capsys, monkeypatch):
    monkeypatch.setattr(prepare_text, "ANNOUNCE_BYTES", 0)
    monkeypatch.setattr(prepare_text, "fingerprint", lambda *_: pytest.fail("hashed"))
    assert main(f"plan pretrain pico-llama {SHORT} {TEXT} --train.epochs 1".split()) == 0
    assert "TextFiles: not prepared yet" in capsys.readouterr().out


def test_a_stand_in_is_named_at_start_and_end(folder, capsys, monkeypatch):
    """If the model wants over 100 times the default text: not for the default model."""
    rows = UnpreparedRows(1_121, 2_048, is_ragged=False, is_streamed=False)
    for model, is_stand_in in (("mini-llama", False), ("pythia-160m", True)):
        config = get_config(model).with_vocab_size(4096)
        args = SimpleNamespace(data=PythonStdlib(), command="pretrain", model_name=model)
        note = data.describe_stand_in(SimpleNamespace(args=args, model=config), rows)
        assert bool(note) == is_stand_in, model
    assert "2.30M tokens of Python's standard library; pythia-160m wants 2.47B, 20 per parameter" in note
    monkeypatch.setattr(data, "MAX_STAND_IN_RATIO", 0)
    words = f"pretrain pico-llama {SHORT} --accelerator cpu --train.global_batch_size 4 --train.max_steps 1"
    assert main([*words.split(), "--eval.final_validation", "false"]) == 0
    before, after = capsys.readouterr().out.split(" step 1/1 ", 1)
    assert before.count("is a stand-in") == after.count("is a stand-in") == 1


def test_more_processes_than_cores_are_named(folder, capsys, monkeypatch):
    monkeypatch.setattr(launch, "launch_processes", mock.Mock(side_effect=UserError("stopped")))
    for devices, line in (("2", ""), ("8", "note: --devices 8 starts 8 processes on 2 CPU cores\n")):
        assert main(f"pretrain pico-llama {SHORT} --accelerator cpu --devices {devices}".split()) == 2
        assert capsys.readouterr().err == f"{line}toolkit pretrain: stopped\n"


RECIPES = [
    path
    for path in sorted((ROOT / "config_hub").rglob("*.yaml"))
    if path.parent.name != "data" and path.stem not in ("dpo", "qlora", "mixture")  # the hub's, CUDA, of this folder
]
RANKS = "pretrain tiny-llama-1.1b --devices 8"
GUIDES = f"""
{RANKS} --num_nodes 2
{RANKS} --data Alpaca2k --data.local_path rows.jsonl --data.prompt_style alpaca --train.global_batch_size 8
{RANKS} --train.global_batch_size 16 --precision bf16-mixed
{RANKS} --train.max_steps 100 --profile
finetune_full base --devices 4 --train.micro_batch_size 1 --train.learning_rate 3e-5
finetune_lora base --devices 8 --num_nodes 2 --train.micro_batch_size 1 --lora_r 8
""".strip().splitlines()


@pytest.mark.slow
def test_the_recipes_and_the_guides_resolve_to_one_configuration(folder, capsys, monkeypatch):
    monkeypatch.setattr(by_memory, "device_bytes", lambda *_: 1e9)  # takes longest
    for name, value in {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)

    def check(words: str) -> None:
        length = "" if "rows" in words else "--train.max_seq_length 64"
        config = require_same(f"{words} {length}", capsys)
        assert isinstance(config, ResolvedConfig) and config.steps, config

    recipes = []
    for path in RECIPES:
        words = f"pretrain --config {path}"
        words += " --data.path data/text/0.txt" if path.stem == "char-text" else ""
        if "finetune" in path.parts:
            words = f"finetune_{path.stem} base --config {path} --data.local_path rows.jsonl --data.prompt_style alpaca"
        recipes.append(words)
    rows = ROWS.replace("batch_size 4", "batch_size 16")
    guides = [f"{line} {rows}" if line.startswith("finetune") else line for line in GUIDES]
    assert len(recipes) == 12
    check_each(check, [*recipes, *guides])
