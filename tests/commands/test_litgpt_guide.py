"""The 20 command lines of the LitGPT guide, with `toolkit` for `litgpt`: each starts as it is written.

Stand-ins: random checkpoints, tokenizers and data of a few kilobytes, in the folders that the guide's commands fill.
Lines without data get the stand-in's (finetuning needs ``--data.json_path``).
"""

import json
import shlex
import sys
from unittest import mock

import pytest
import torch
from helpers.cases import check_each
from helpers.small_runs import write_base

from toolkit import extension
from toolkit.checkpoints.folder import read_model_config
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.data import RedPajama
from toolkit.data.tokenizer import Tokenizer
from toolkit.distributed.world import detect_world
from toolkit.planning.auto import resolve_auto
from toolkit.planning.resolve import DeviceSpec
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import run_args

INSTALLED = extension._installed
ALPACA = "--data JSON --data.json_path data/alpaca.json"
TINY = "toolkit pretrain tiny-llama-1.1b --devices 8"
LLAMA_70B = "toolkit finetune_lora meta-llama/Llama-2-70b-hf"
LORA = "--precision bf16-mixed --train.max_seq_length"
LINES = f"""
toolkit finetune_lora meta-llama/Llama-2-7b-hf --devices 4 {ALPACA}
{LLAMA_70B} --devices 8 --num_nodes 2 {ALPACA}
{TINY} --num_nodes 1 --compiler thunder --strategy fsdp
{TINY} --train.global_batch_size 512 --train.micro_batch_size 8 --data Alpaca2k
toolkit pretrain llama-2-7b --devices 8 --num_nodes 4 --train.global_batch_size 1024 \
--train.micro_batch_size 2 --data RedPajama
{LLAMA_70B} {ALPACA} --devices 8 --train.global_batch_size 16 --train.micro_batch_size 1 --lora_r 8
toolkit finetune_full meta-llama/Llama-2-7b-hf --devices 4 {ALPACA} --train.global_batch_size 16 \
--train.micro_batch_size 1 --train.learning_rate 3e-5
{TINY} --precision bf16-mixed
{TINY} --precision 16-mixed
{TINY} --train.global_batch_size 512 --train.micro_batch_size 2
toolkit finetune_lora meta-llama/Llama-2-7b-hf --quantize bnb.nf4 --devices 1 {ALPACA}
{TINY} --out_dir checkpoints/tinyllama-pretrain
{TINY} --out_dir checkpoints/tinyllama-pretrain --resume checkpoints/tinyllama-pretrain/
python scripts/convert_lit_checkpoint.py --checkpoint_path checkpoints/tinyllama-pretrain/final/lit_model.pth \
--output_dir models/tinyllama-hf
NCCL_DEBUG=INFO NCCL_IB_DISABLE=1 {TINY}
srun toolkit pretrain llama-2-7b --devices 8 --num_nodes 4 --data RedPajama
torchrun --nproc_per_node=8 --nnodes=4 --node_rank=0 --master_addr=localhost --master_port=29500 \
-m toolkit pretrain llama-2-7b
{TINY} --train.max_steps 100 --profile
toolkit finetune_lora meta-llama/Llama-2-7b-hf {LORA} 512 --lora_r 8 {ALPACA}
{LLAMA_70B} {LORA} 256 --lora_r 8 {ALPACA}
toolkit finetune_lora meta-llama/Llama-3.1-405B {LORA} 256 --lora_r 16 {ALPACA}
""".strip().splitlines()
NODE = {"srun": {"SLURM_NTASKS": "4", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
                 "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[1-4]"},
        "torchrun": {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8", "LOCAL_RANK": "0",
                     "RANK": "0", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "4"}}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with what the guide has downloaded before."""
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("".join(f"The guide trains on line {i} of a text.\n" for i in range(4000)))
    for name in ("Llama-2-7b-hf", "Llama-2-70b-hf", "Llama-3.1-405B"):
        base = tmp_path / "checkpoints/meta-llama" / name
        base.mkdir(parents=True)
        write_base(base, text, block_size=512, intermediate_size=192)
    tokenizer = tmp_path / "checkpoints/TinyLlama/TinyLlama_v1.1"
    tokenizer.mkdir(parents=True)
    Tokenizer.load(base).save(tokenizer)
    (tmp_path / "data").mkdir()
    rows = [{"instruction": f"Say {i}.", "input": "", "output": f"line {i}"} for i in range(600)]
    (tmp_path / "data/alpaca.json").write_text(json.dumps(rows))
    return tmp_path


def split(line: str) -> tuple[dict[str, str], str, list[str]]:
    """Return a line's variables, its launcher, and the words after `toolkit`."""
    words = shlex.split(line)
    variables = dict(word.split("=", 1) for word in words if word.startswith("NCCL_"))
    start = words.index("toolkit")
    return variables, words[0], words[start + 1 :]


def test_each_line_resolves_as_it_is_written(folder, monkeypatch):
    """On the machines that they name: nothing is replaced but checkpoints and data, and nothing is started."""

    def check(line: str) -> None:
        if line.startswith("python"):
            return  # needs a run, see below
        variables, launcher, words = split(line)
        command, *rest = words
        node = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"} | NODE.get(launcher, {})
        with mock.patch.dict("os.environ", variables | node), mock.patch.object(extension, "_installed", INSTALLED):
            if "--resume" in words:
                (folder / "checkpoints/tinyllama-pretrain/step-00000001").mkdir(parents=True)
                (folder / "checkpoints/tinyllama-pretrain/step-00000001/COMPLETE").touch()
            args = run_args(**parse(command, rest))
            check_start(args)
            world = detect_world(args.devices, args.num_nodes, 8)
            config = resolve_auto(args, DeviceSpec("cuda", world.devices, world.num_nodes, has_bf16=True))
        named = [int(words[words.index(flag) + 1]) for flag in ("--devices", "--num_nodes") if flag in words]
        assert launcher == "torchrun" or [world.devices, world.num_nodes][: len(named)] == named
        assert config.strategy.layout.world_size == world.world_size
        assert ("RedPajama" in words) == isinstance(args.data, RedPajama)
        if command == "pretrain":
            repository = "TinyLlama/TinyLlama_v1.1" if "tiny-llama-1.1b" in words else "meta-llama/Llama-2-7b-hf"
            assert args.tokenizer_dir == f"checkpoints/{repository}"

    assert len(LINES) == 21  # the guide counts the same command under two numbers
    check_each(check, LINES)


@pytest.mark.slow
def test_each_line_trains_a_step(folder, monkeypatch, capsys):
    """In order, one step each. A machine without GPUs forces: one CPU process instead of 4 to 32 GPUs, two narrow
    layers of each named architecture, bf16-mixed for 16-mixed, no compiler for thunder, the Alpaca file for Alpaca2k,
    text files for the standard library and RedPajama, and no launcher."""
    small = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2, "head_size": 16, "intermediate_size": 160}
    instead = {
        "--devices": ["--devices", "1"], "--num_nodes": [], "--compiler": [], "--strategy": [],
        "Alpaca2k": ["Alpaca2k", "--data.local_path", "data/alpaca.json"],
        "RedPajama": ["RedPajama", "--data.repo_id", "null", "--data.path", "text", "--data.cache_dir", "cache"],
    }  # fmt: skip
    text = ["--data", "TextFiles", "--data.train_data_path", "text", "--data.cache_dir", "cache"]

    def run(line: str) -> None:
        if line.startswith("python"):
            from convert_lit_checkpoint import main as convert

            with mock.patch.object(sys, "argv", shlex.split(line)[1:]):
                assert convert() == 0
            return
        variables, _, words = split(line)
        is_new = "--out_dir" not in words
        chosen: list[str] = []
        while words:
            word = words.pop(0)
            if word in ("--devices", "--num_nodes", "--compiler", "--strategy"):
                words.pop(0)
            chosen += instead.get(word, [word])
        chosen = ["bf16-mixed" if word == "16-mixed" else word for word in chosen]
        if chosen[0] == "pretrain":
            chosen += [word for name, value in small.items() for word in (f"--model_config.{name}", str(value))]
            chosen += [] if "--data" in chosen else text
        length = "64" if "text" in chosen else "256"
        chosen += [] if "--train.max_seq_length" in chosen else ["--train.max_seq_length", length]
        chosen += ["--accelerator", "cpu", "--train.max_steps", "1", "--eval.final_validation", "false"]
        chosen += ["--profiler.wait", "0", "--profiler.warmup", "0"] if "--profile" in chosen else []
        chosen += ["--out_dir", f"out/{LINES.index(line)}"] if is_new else []
        with mock.patch.dict("os.environ", variables):
            code = main(chosen)
        errors = capsys.readouterr().err
        assert code == 0, errors

    check_each(run, LINES)
    assert read_model_config(folder / "checkpoints/tinyllama-pretrain/final").name == "tiny-llama-1.1b"
    assert (folder / "models/tinyllama-hf/config.json").is_file()
    assert torch.load(folder / "checkpoints/tinyllama-pretrain/final/lit_model.pth", weights_only=True)
