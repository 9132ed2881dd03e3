"""CharText: a token per character, from a file or a URL; and its sequence length."""

import json

import pytest

from toolkit.cli import main
from toolkit.data import CharText
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError

TEXT = "To be, or not to be: that is the question.\n" * 20


@pytest.fixture
def prepare(tmp_path, monkeypatch):
    """Return a function that prepares text in a private cache and returns the data and its log."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "input.txt").write_text(TEXT)

    def run(path="input.txt", tokenizer=None, max_seq_length=16, **options):
        lines = []
        data = CharText(str(path), cache_dir=str(tmp_path / "cache"), **options)
        return data.prepare(tokenizer=tokenizer, max_seq_length=max_seq_length, report=lines.append), "\n".join(lines)

    return run


def decoded(rows, tokenizer) -> str:
    return "".join(
        tokenizer.decode([*rows[i]["input_ids"].tolist(), rows[i]["labels"][-1].item()]) for i in range(len(rows))
    )


def test_tokens_are_characters_and_the_end_is_held_out(prepare):
    data, _ = prepare(train_split=0.8, truncate=0.5)
    assert data.tokenizer.vocab_size == len(set(TEXT)) + 2
    used = len(TEXT) // 2
    train, val = decoded(data.train, data.tokenizer), decoded(data.val, data.tokenizer)
    assert TEXT.startswith(train) and 0 <= 0.8 * used - len(train) < 18
    assert TEXT[:used][-len(val) - 34 :].find(val) >= 0 and 0 <= 0.2 * used - len(val) < 18
    again, _ = prepare(tokenizer=data.tokenizer)
    assert decoded(again.train, data.tokenizer) == TEXT[: len(again.train) * 17]
    with pytest.raises(UserError, match="--data CharText: the tokenizer .* has tokens of more than one character; use"):
        prepare(tokenizer=train_bpe([TEXT], 300))
    with pytest.raises(UserError, match="^--data.path none.txt: no such file; provide a text file or its URL$"):
        prepare("none.txt")


def test_url_is_downloaded_once(prepare, web, tmp_path):
    local, _ = prepare()
    for expected in ("downloading", "from its copy in"):
        data, log = prepare(f"{web}/input.txt")
        assert expected in log and data.content_key == local.content_key
        (tmp_path / "input.txt").unlink(missing_ok=True)
    (copy,) = (tmp_path / "cache").glob("file-*/content")
    copy.write_text("edited")
    for url, message in (
        (f"{web}/input.txt", "^--data.path http.*/input.txt: no such file"),
        (
            "http://127.0.0.1:9/x",
            r"^--data.path http://127.0.0.1:9/x: the storage does not respond \(ClientConnectorError\); check the net",
        ),
        ("nothing://x/y", "^--data.path nothing://x/y: unknown kind of storage"),
        ("https://me:hidden@host/x", "^--data.path https://...: contains credentials"),
    ):
        with pytest.raises(UserError, match=message) as error:
            prepare(url)
        assert "\n" not in str(error.value) and "hidden" not in str(error.value)


def test_block_size_sets_the_sequence_length(prepare, capsys, refusal):
    data = ["--data", "CharText", "--data.path", "input.txt", "--data.block_size", "12", "--data.cache_dir", "cache"]
    plan = ["plan", "pretrain", "pico-llama", "--model_config.vocab_size", "64", *data]
    for command in ([*plan, "--train.max_steps", "1"], ["inspect_data", *data]):
        capsys.readouterr()
        assert main([*command, "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["max_seq_length"] == 12
    for command, flag in ((plan, "train.max_seq_length"), (["inspect_data", *data], "max_seq_length"),
                          (["prepare_data", *data], "max_seq_length")):  # fmt: skip
        assert f"--data.block_size 12: --{flag} is 9; set only one of them\n" in refusal(*command, f"--{flag}", "9")
