"""`toolkit generate` on a real folder: text on stdout, statistics on stderr."""

import json
import re
import subprocess
import sys

import pytest
import torch

from toolkit.checkpoints.folder import write_model_files
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

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
    return folder


def run(capsys, *argv) -> tuple[str, str]:
    assert main(["generate", *map(str, argv)]) == 0
    return tuple(capsys.readouterr())


def test_text_on_stdout_and_statistics_on_stderr(folder, capsys):
    out, err = run(capsys, folder, "--prompt", "abc", "--max_new_tokens", 9, "--temperature", 0)
    assert out == "abcé🎉abc\n"
    assert re.fullmatch(r"sample 1 of 1: 9 tokens in [\d.]+ s, [\d.]+ tokens/s; seed 1234; cpu\n", err)


def test_a_character_that_is_cut_off_by_the_limit_shows_as_such(folder, capsys):
    out, _ = run(capsys, folder, "--prompt", "abc", "--max_new_tokens", 4, "--temperature", 0)
    assert out == "abcé\ufffd\n"


def test_samples_have_seeds_of_their_own(folder, capsys):
    settings = [folder, "--prompt", "a", "--temperature", 3, "--top_k", 0, "--max_new_tokens", 20]
    out, err = run(capsys, *settings, "--num_samples", 2, "--seed", 5)
    assert "sample 1 of 2" in err and "seed 5;" in err and "sample 2 of 2" in err and "seed 6;" in err
    first, _ = run(capsys, *settings, "--seed", 5)
    second, _ = run(capsys, *settings, "--seed", 6)
    assert out == first + second and first != second


def test_stops_at_the_ids_of_generation_config(folder, tmp_path, capsys):
    import shutil

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    stop = train_bpe(["abc"], vocab_size=257).encode("c")[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1000, stop]}))
    out, err = run(capsys, tmp_path, "--prompt", "abc", "--max_new_tokens", 30, "--temperature", 0)
    assert out == "abcé🎉ab\n"
    assert "8 tokens in" in err


def test_an_empty_prompt_begins_a_document(folder, capsys):
    _, err = run(capsys, folder, "--prompt", "", "--max_new_tokens", 3)
    assert "tokens in" in err


def test_bfloat16(folder, capsys):
    out, _ = run(
        capsys, folder, "--prompt", "abc", "--max_new_tokens", 9, "--temperature", 0, "--precision", "bf16-true"
    )
    assert out == "abcé🎉abc\n"


def test_the_prompt_from_stdin_and_text_as_it_comes(folder):
    """In a real process: each complete character is a write of its own."""
    command = [sys.executable, "-m", "toolkit", "generate", str(folder)]
    options = ["--prompt", "-", "--max_new_tokens", "9", "--temperature", "0"]
    done = subprocess.run([*command, *options], input=b"abc", capture_output=True)
    assert (done.returncode, done.stdout.decode()) == (0, "abcé🎉abc\n"), done.stderr.decode()


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["no/such/model"], "toolkit generate: checkpoint_dir no/such/model: no such folder"),
        (["DIR", "--temperature", "-1"], "toolkit generate: --temperature -1.0: must not be negative"),
        (["DIR", "--num_samples", "0"], "toolkit generate: --num_samples 0: must be greater than zero"),
        (["DIR", "--max_new_tokens", "0"], "toolkit generate: --max_new_tokens 0: must be greater than zero"),
        (["DIR", "--prompt", "a" * 64], "toolkit generate: --prompt: has 64 tokens; the model's context of 64"),
        (["DIR", "--prompt", "\udcff"], "toolkit generate: --prompt: is not valid UTF-8"),
        (["DIR", "--topk", "3"], "toolkit generate: --topk 3: no such option; did you mean --top_k?"),
        ([], "toolkit generate: --checkpoint_dir: must be given; usage: toolkit generate CHECKPOINT_DIR"),
    ],
)
def test_mistakes(folder, capsys, argv, line):
    assert main(["generate", *(str(folder) if a == "DIR" else a for a in argv)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(line) and err.count("\n") == 1
    assert out == ""  # nothing is shown before the mistake is
