"""`toolkit inspect_data` text and JSON output."""

import io
import json
import re

import pytest
from helpers.small_runs import text_data
from rich.console import Console

from toolkit.cli import main
from toolkit.data.inspection import _decode_each
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.ui.tokens import bracketed, print_inspection

ROWS = [{"prompt": "hi 你", "completion": "yes\nno"}, {"prompt": "who?", "completion": "me"}, {"text": "a" * 50}]


@pytest.fixture
def tokenizer_dir(tmp_path):
    """Bytes as tokens, with ChatML's tokens."""
    from tokenizers import Tokenizer as Core

    files = dict(train_bpe(["x"], 257)._files)
    core = Core.from_str(files["tokenizer.json"].decode())
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    Tokenizer(files | {"tokenizer.json": core.to_str().encode()}, "x").save(folder)
    return folder


@pytest.fixture
def inspect(tokenizer_dir, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    data = ["--data", "JSON", "--data.json_path", str(path), "--data.prompt_style", "chatml"]
    data += ["--data.cache_dir", str(tmp_path / "cache"), "--data.val_split_fraction", "0"]

    def run(*options):
        code = main(["inspect_data", *data, "--tokenizer_dir", str(tokenizer_dir), *options])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out, shown.err

    return run


def test_piped_output_has_brackets(inspect, tmp_path):
    out, err = inspect("--max_seq_length", "46")
    first = out.split("\n\n")[0].splitlines()
    assert first[0].startswith(f"Sample 1: {tmp_path}/rows.jsonl line 1: 7 of ") and "\x1b" not in out
    prompt = first.index("<|im_start|>user")
    assert first[prompt:] == [
        "<|im_start|>user", "hi 你<|im_end|>", "<|im_start|>assistant", "[y][e][s][\\n]", "[n][o][<|im_end|>]",
    ]  # fmt: skip
    assert "Tokens in [brackets] are trained" in out and "Data: preparing" in err and "Data:" not in out
    counts = {line[:20].strip(): line[20:].strip() for line in out.splitlines()[-12:]}
    assert counts["samples"] == "3" and counts["truncated"] == "1 (33.3 %)" and counts["dropped"] == "0 (0.0 %)"
    assert counts["longest samples"] == f"51 tokens: {tmp_path}/rows.jsonl line 3"


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_json_holds_every_token_and_count(inspect, packing):
    out, _ = inspect(
        "--format", "json", "--max_seq_length", "100", "--num_samples", "3", "--data.packing", packing,
    )  # fmt: skip
    found = json.loads(out)
    samples = sorted(found["samples"], key=lambda sample: sample["where"])  # packed rows have another order
    assert [sample["where"][-6:] for sample in samples] == ["line 1", "line 2", "line 3"]
    for sample in samples:
        assert "".join(token["text"] for token in sample["tokens"]) == sample["text"]
    first, _, text = samples
    assert "".join(token["text"] for token in first["tokens"] if token["trained"]) == "yes\nno<|im_end|>"
    assert [token["trained"] for token in text["tokens"]] == [False] + [True] * 50  # the first is never predicted
    counts = found["counts"]
    trained = sum(token["trained"] for sample in found["samples"] for token in sample["tokens"])
    assert counts["trained_tokens"] == trained and counts["samples"] == 3
    assert counts["trained_percent"] == pytest.approx(100 * trained / counts["tokens"])
    assert counts["train_rows"] == (3 if packing == "none" else 2)
    if packing == "best_fit":
        assert counts["packing_efficiency_percent"] == pytest.approx(counts["tokens"] / 2)  # % of 2 x 100
    assert found["longest"][0]["tokens"] == max(len(sample["tokens"]) for sample in found["samples"])


def test_one_sample_or_none(inspect):
    assert len(json.loads(inspect("--format", "json", "--num_samples", "1")[0])["samples"]) == 1
    out, _ = inspect("--num_samples", "0")
    assert "Sample" not in out and "trained tokens" in out


def test_dropped_samples_are_counted_by_reason(inspect):
    out, _ = inspect("--max_seq_length", "46", "--data.on_long", "drop")
    counts = {line[:20].strip(): line[20:].strip() for line in out.splitlines()}
    assert counts["dropped"] == "1 (33.3 %)" and counts["too long"] == "1" and "without" not in out


def test_color_marks_trained_tokens(inspect):
    found = json.loads(inspect("--format", "json")[0])
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80, highlight=False)
    print_inspection(found, terminal)
    shown = terminal.file.getvalue()
    assert "\x1b[30;42my\x1b[0m" in shown or "\x1b[30;102my\x1b[0m" in shown
    assert "\x1b[2mh\x1b[0m" in shown or "\x1b[2mi\x1b[0m" in shown  # every other masked token is dim
    assert "[y]" not in shown and "shades separate tokens" in shown


def test_a_narrow_terminal_breaks_lines_between_words_and_a_file_does_not(inspect):
    found = json.loads(inspect("--format", "json")[0])
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, color_system=None, width=40, highlight=False)
        print_inspection(found, console)
        lines = console.file.getvalue().splitlines()
        assert (max(len(line) for line in lines if "[" not in line) <= 40) == is_terminal, lines
    assert any(re.fullmatch(r"Sample 1: .* line \d: .* tokens trained", line) for line in lines)


def test_pretraining_data(corpus, tmp_path, capsys):
    options = ["--data.cache_dir", str(tmp_path), "--max_seq_length", "32", "--num_samples", "2"]
    assert main(["inspect_data", *text_data(corpus), *options]) == 0
    out = capsys.readouterr().out
    assert "Sample 2: row 2: 32 of 33 tokens trained" in out and "trained              100.0 %" in out


def test_random_tokens_have_no_text(capsys):
    options = ["--data.num_rows", "8", "--max_seq_length", "4", "--num_samples", "1", "--format", "json"]
    assert main(["inspect_data", "--data", "SyntheticTokens", *options]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["text"] == " ".join(str(token["id"]) for token in sample["tokens"]) and len(sample["tokens"]) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max_seq_length", "0"], "--max_seq_length 0: must be greater than zero"),
        (["--num_samples", "-1"], "--num_samples -1: must not be negative"),
        (["--tokenizer_dir", "nowhere"], "--tokenizer_dir nowhere: no such folder"),
        (["--data", "JSON", "--data.json_path", "x.json"], "--data JSON: needs the tokenizer"),
    ],
)
def test_invalid_arguments_are_rejected(options, message, refusal):
    err = refusal("inspect_data", *options)
    assert err.startswith(f"toolkit inspect_data: {message}")


def test_a_name_below_checkpoints(inspect, tokenizer_dir, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "org").mkdir(parents=True)
    tokenizer_dir.rename(tmp_path / "checkpoints" / "org" / "model")
    monkeypatch.chdir(tmp_path)
    assert "Sample 1" in inspect("--tokenizer_dir", "org/model")[0]


def test_each_token_shows_its_part_of_the_text(tokenizer_dir):
    tokenizer = Tokenizer.load(tokenizer_dir)
    text = "naïve 你好, \N{ROCKET} <|im_end|> \N{REPLACEMENT CHARACTER}."
    pieces = list(_decode_each(tokenizer, ids := tokenizer.encode(text)))
    assert "".join(pieces) == text and len(pieces) == len(ids)
    assert "你" in pieces and "ï" in pieces and "<|im_end|>" in pieces
    assert list(_decode_each(tokenizer, tokenizer.encode("你")[:2]))[-1] == "\N{REPLACEMENT CHARACTER}"


def test_control_characters_are_escaped():
    tokens = [{"id": 0, "text": "a\x1b[31m", "trained": False}, {"id": 1, "text": "\x07", "trained": True}]
    assert bracketed(tokens) == "a\\x1b\\[31m[\\x07]"
    assert bracketed([{"id": 0, "text": "é", "trained": True}], "ascii") == "[?]"


def test_brackets_of_the_text_do_not_look_like_trained_tokens():
    texts = {'[{"type": "function"}]\\': False, "[a]": True}
    tokens = [{"id": 0, "text": text, "trained": is_trained} for text, is_trained in texts.items()]
    assert bracketed(tokens) == r'\[{"type": "function"}\]\\[\[a\]]'
