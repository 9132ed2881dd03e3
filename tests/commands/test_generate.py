"""`toolkit generate` on a real folder: text on stdout, statistics on stderr."""

import copy
import io
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.initialize import add_lora
from helpers.sealing import seal

from toolkit import api
from toolkit.checkpoints.adapters import AdapterInfo, base_fingerprint, write_adapter_files
from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.cli import main
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.models.lora_config import LoRAConfig
from toolkit.models.quantize import quantize_linears

CYCLE = "é🎉abc"  # what the model of this test says after each of its characters, byte by byte


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has learned CYCLE by heart: each byte is a token, most characters are several."""
    tokenizer = train_bpe(["abc"], vocab_size=257)
    torch.manual_seed(0)
    config = ModelConfig(name="cycle", block_size=64, vocab_size=257, n_layer=1, n_head=2, n_embd=32)
    model = GPT(config)
    ids = torch.tensor(tokenizer.encode(CYCLE * 5))[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss, n_tokens = model(ids[:, :-1], ids[:, 1:])
        (loss / n_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("model")
    write_model_files(folder, state_dict=model.state_dict(), config=config, hyperparameters=None, tokenizer=tokenizer)
    return seal(folder)


def run(capsys, *argv) -> tuple[str, str]:
    assert main(["generate", *map(str, argv)]) == 0
    return tuple(capsys.readouterr())


def test_text_on_stdout_and_statistics_on_stderr(folder, capsys):
    out, err = run(capsys, folder, "--prompt", "abc", "--max_new_tokens", 9, "--temperature", 0)
    assert out == "abcé🎉abc\n"
    assert re.fullmatch(r"sample 1 of 1: 9 tokens in [\d.]+ s, [\d.]+ tokens/s; seed 1234; cpu\n", err)


def test_truncated_character_is_shown_as_replacement(folder, capsys):
    out, _ = run(capsys, folder, "--prompt", "abc", "--max_new_tokens", 4, "--temperature", 0)
    assert out == "abcé\ufffd\n"


def test_samples_use_different_seeds(folder, capsys):
    settings = [folder, "--prompt", "a", "--temperature", 3, "--top_k", 0, "--max_new_tokens", 20]
    out, err = run(capsys, *settings, "--num_samples", 2, "--seed", 5)
    assert "sample 1 of 2" in err and "seed 5;" in err and "sample 2 of 2" in err and "seed 6;" in err
    first, _ = run(capsys, *settings, "--seed", 5)
    second, _ = run(capsys, *settings, "--seed", 6)
    assert out == first + second and first != second


def test_stops_at_the_ids_of_generation_config(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stop = train_bpe(["abc"], vocab_size=257).encode("c")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1000, stop]}))
    seal(tmp_path)
    out, err = run(capsys, tmp_path, "--prompt", "abc", "--max_new_tokens", 30, "--temperature", 0)
    assert out == "abcé🎉ab\n"
    assert "8 tokens in" in err


def test_an_empty_prompt_begins_a_document(folder, capsys):
    _, err = run(capsys, folder, "--prompt", "", "--max_new_tokens", 3)
    assert "tokens in" in err


def test_each_prompt_of_a_file_gives_what_it_gives_alone(folder, tmp_path, capsys, refusal, monkeypatch):
    prompts = ["abc", "é\u2028🎉a", "c"]  # U+2028 is a line for str.splitlines
    settings = ["--max_new_tokens", 9, "--temperature", 2, "--top_k", 5, "--num_samples", 2, "--seed", 7]
    expected = [api.generate(folder, prompt, max_new_tokens=9, temperature=2, top_k=5, num_samples=2, seed=7)
                for prompt in prompts]  # fmt: skip
    (tmp_path / "lines.txt").write_text("\n\n".join(prompts))
    rows = [json.dumps({"prompt": prompt, "id": i}, ensure_ascii=False) for i, prompt in enumerate(prompts)]
    (tmp_path / "rows.jsonl").write_text("\r\n".join(rows), encoding="utf-8-sig")
    for name, size in (("lines.txt", 4), ("rows.jsonl", 2)):
        out, err = run(capsys, folder, "--prompts_path", tmp_path / name, "--batch_size", size, *settings)
        found = [json.loads(line) for line in out.removesuffix("\n").split("\n")]
        assert [row["text"] for row in found] == sum(expected, []), name
        assert [(row["prompt"], row["seed"]) for row in found] == [(p, s) for p in prompts for s in (7, 8)]
        assert [row.get("id") for row in found] == ([0, 0, 1, 1, 2, 2] if name == "rows.jsonl" else [None] * 6)
        assert re.fullmatch(r"3 prompts: \d+ tokens in [\d.]+ s, [\d.]+ tokens/s; cpu\n", err)
    given = {"max_new_tokens": 9, "temperature": 2, "top_k": 5, "num_samples": 2, "seed": 7}
    assert api.generate(folder, prompts, batch_size=3, **given) == sum(expected, [])
    assert api.generate(folder, "abc", batch_size=1, **given) == expected[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    out, err = run(capsys, folder, "--prompts_path", "-", *settings)
    assert [json.loads(line)["text"] for line in out.splitlines()] == expected[0] and err.startswith("1 prompt: ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\udcff\n"))
    assert "--prompts_path -: is not valid UTF-8" in refusal("generate", folder, "--prompts_path", "-")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    (tmp_path / "half.jsonl").write_text('{"prompt": "a", "id": "\\ud800"}\n')
    (tmp_path / "long.txt").write_text(f"a\n\n{'b' * 64}\n")
    (tmp_path / "list.json").write_text("[\n]")
    for argv, message in (
        (["--prompts_path", tmp_path / "rows.jsonl"], 'rows.jsonl:2: must be {"prompt": "text"}'),
        (["--prompts_path", tmp_path / "half.jsonl"], 'half.jsonl:1: must be {"prompt": "text"}'),
        (["--prompts_path", tmp_path / "none.txt"], "none.txt: No such file or directory; give a file"),
        (["--prompts_path", tmp_path], f"--prompts_path {tmp_path}: Is a directory; give a file"),
        (
            ["--prompts_path", tmp_path / "long.txt"],
            f"--prompts_path {tmp_path / 'long.txt'}:3: has 64 tokens, but the model's context length is 64; shorten",
        ),
        (["--prompts_path", tmp_path / "lines.txt", "--prompt", "x"], "--prompt x: has no effect with --prompts_path"),
        (["--prompts_path", tmp_path / "list.json"], "list.json: must be text with one prompt per line, or JSON Lines"),
        (["--prompts_path", "no.txt", "--top_k", -1], "--top_k -1: must not be negative"),
        (["--batch_size", 3], "--batch_size 3: has no effect without --prompts_path"),
    ):
        assert main(["generate", str(folder), *map(str, argv)]) == 2
        out, err = capsys.readouterr()
        assert message in err and err.count("\n") == 1 and out == ""


def test_notices_have_the_line_of_the_prompt(folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text(f"a\nb\n{'abc' * 20}\n")
    _, err = run(capsys, folder, "--prompts_path", tmp_path / "prompts.txt", "--batch_size", 2, "--max_new_tokens", 9)
    name = f"--prompts_path {tmp_path / 'prompts.txt'}:3"
    assert err.startswith(f"{name}: stopped after 4 new tokens: the model's context of 64 tokens is full\n3 prompts: ")


@pytest.mark.slow
def test_weights_in_4_bits(tmp_path, capsys):
    """Text and loss match the model that has the dequantized weights."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    config = ModelConfig(name="wide", block_size=64, vocab_size=257, n_layer=1, n_head=2, n_embd=64)
    tokenizer, model = train_bpe(["abc"], vocab_size=257), GPT(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    states = {"plain": model.state_dict()}
    for kind in ("bnb.nf4", "bnb.nf4-dq"):
        quantized = copy.deepcopy(model)
        quantize_linears(quantized, kind)
        layers = {name: part for name, part in quantized.named_modules() if hasattr(part, "base_weight")}
        states[kind] = states["plain"] | {f"{name}.weight": part.base_weight() for name, part in layers.items()}
    settings, found = ["--prompt", "abc", "--max_new_tokens", 20, "--temperature", 0], {}

    def loss(folder, *options):
        data = "--data SyntheticTokens --data.vocab_size 257 --split train --max_seq_length 32 --eval.max_iters 2"
        assert main(["evaluate", str(folder), *data.split(), "--format", "json", *options]) == 0
        return json.loads(capsys.readouterr().out)["loss"]

    for name, state in states.items():
        folder = tmp_path / name
        folder.mkdir()
        write_model_files(folder, state_dict=state, config=config, hyperparameters=None, tokenizer=tokenizer)
        found[name], _ = run(capsys, seal(folder), *settings)
        if name != "plain":
            assert run(capsys, tmp_path / "plain", *settings, "--quantize", name)[0] == found[name] != found["plain"]
            assert loss(tmp_path / "plain", "--quantize", name) == pytest.approx(loss(folder), rel=1e-5)
            assert loss(folder) != pytest.approx(loss(tmp_path / "plain"), rel=1e-5)


def test_bfloat16(folder, capsys):
    out, _ = run(
        capsys, folder, "--prompt", "abc", "--max_new_tokens", 9, "--temperature", 0, "--precision", "bf16-true"
    )
    assert out == "abcé🎉abc\n"


@pytest.mark.slow
def test_prompt_from_stdin_and_streamed_text(folder):
    """In a real process: each complete character is a separate write."""
    command = [sys.executable, "-m", "toolkit", "generate", str(folder)]
    options = ["--prompt", "-", "--max_new_tokens", "9", "--temperature", "0"]
    done = subprocess.run([*command, *options], input=b"abc", capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, "abcé🎉abc\n"), done.stderr.decode()


def test_answers_of_a_batch_may_all_be_empty(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "model")
    eos = Tokenizer.load(folder).encode("é")[0]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (tmp_path / "prompts.txt").write_text("abc\nabc\n")
    seal(tmp_path / "model")
    out, _ = run(capsys, tmp_path / "model", "--prompts_path", tmp_path / "prompts.txt", "--temperature", 0)
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["", ""]


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Adapters next to that model, with values that change what it says, and dropout that must not act here."""
    model, lora = load_model(folder), LoRAConfig(r=4, dropout=0.5, mlp=True)
    add_lora(model, lora)
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(p.shape, generator=generator) / 2 for name, p in model.named_parameters() if is_adapter(name)
    }
    out = tmp_path_factory.mktemp("adapters")
    info = AdapterInfo(lora, folder, base_fingerprint(folder))
    write_adapter_files(out, values, info)
    write_model_files(out, state_dict=None, config=model.config, hyperparameters=None, tokenizer=Tokenizer.load(folder))
    return seal(out)


def test_unmerged_adapters_generate_the_same_as_merged(folder, adapters, tmp_path, capsys):
    settings = ["--prompt", "abc", "--max_new_tokens", 40, "--temperature", 0]
    unmerged, _ = run(capsys, adapters, *settings)
    assert unmerged != run(capsys, folder, *settings)[0]
    assert main(["merge_lora", str(adapters), "--out_dir", str(tmp_path / "merged")]) == 0
    capsys.readouterr()
    assert run(capsys, tmp_path / "merged", *settings)[0] == unmerged


def test_moved_base(folder, adapters, tmp_path, capsys, refusal):
    expected, _ = run(capsys, adapters, "--temperature", 0)
    shutil.copytree(folder, tmp_path / "moved")
    shutil.copytree(adapters, tmp_path / "adapters")
    info = tmp_path / "adapters" / "adapter.yaml"
    info.write_text(info.read_text().replace(str(folder), "/nowhere"))
    seal(tmp_path / "adapters")
    assert "does not exist; set its location with --base_checkpoint_dir" in refusal(
        "generate", tmp_path / "adapters", "--temperature", "0"
    )
    found, _ = run(capsys, tmp_path / "adapters", "--temperature", 0, "--base_checkpoint_dir", tmp_path / "moved")
    assert found == expected


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["no/such/model"], "toolkit generate: checkpoint_dir no/such/model: no such folder"),
        (["DIR", "--temperature", "-1"], "toolkit generate: --temperature -1.0: must not be negative"),
        (["DIR", "--num_samples", "0"], "toolkit generate: --num_samples 0: must be greater than zero"),
        (["DIR", "--max_new_tokens", "0"], "toolkit generate: --max_new_tokens 0: must be greater than zero"),
        (["DIR", "--prompt", "a" * 64], "toolkit generate: --prompt: has 64 tokens, but must have fewer than 64"),
        (["DIR", "--prompt", "\udcff"], "toolkit generate: --prompt: is not valid UTF-8"),
        (["DIR", "--base_checkpoint_dir", "x"], "toolkit generate: --base_checkpoint_dir x: has no effect"),
        (["DIR", "--topk", "3"], "toolkit generate: --topk: no such option; did you mean --top_k?"),
        ([], "toolkit generate: CHECKPOINT_DIR: must be given; usage: toolkit generate CHECKPOINT_DIR"),
    ],
)
def test_invalid_arguments_are_rejected(folder, capsys, argv, line):
    assert main(["generate", *(str(folder) if a == "DIR" else a for a in argv)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line) and err.count("\n") == 1
    assert out == ""  # nothing is shown before the mistake is
