"""The tokenizer of a named architecture: from checkpoints/, the cache of the hub, or the command that fetches it."""

from pathlib import Path

import pytest
from helpers.cases import check_each

from toolkit.cli.parser import parse
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.families import get_config, list_names
from toolkit.models.families.repositories import repository_of
from toolkit.planning.data import prepare_data
from toolkit.planning.run_args import RunArgs
from toolkit.planning.start_checks import check_start
from toolkit.planning.training_options import run_args

TINY = "TinyLlama/TinyLlama_v1.1"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("text.txt").write_text("a b c d " * 400)
    return tmp_path


def read(words: str) -> RunArgs:
    return run_args(**parse("pretrain", words.split()))


def write_tokenizer(folder: Path) -> str:
    folder.mkdir(parents=True)
    train_bpe(["a b c d"], 257).save(folder)
    return str(folder)


def test_it_is_taken_from_checkpoints_and_from_the_cache_of_the_hub(here):
    assert read("tiny-llama-1.1b").tokenizer_dir is None
    snapshot = here / "hub/models--TinyLlama--TinyLlama_v1.1/snapshots/abc"
    blob = Path(write_tokenizer(here / "blobs"), "tokenizer.json").rename(here / "blob")
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    (snapshot.parents[1] / "blobs").mkdir()
    (snapshot / "tokenizer.json").symlink_to(blob.rename(snapshot.parents[1] / "blobs/1"))
    args = read("tiny-llama-1.1b --data TextFiles --data.train_data_path text.txt --train.global_batch_size 1")
    assert args.tokenizer_dir == str(snapshot)
    lines: list[str] = []
    assert prepare_data(args, 8, lines.append).tokenizer.vocab_size == 257
    assert lines[0] == f"Tokenizer: {snapshot}"
    folder = write_tokenizer(Path("checkpoints") / TINY)
    mine = write_tokenizer(Path("checkpoints/EleutherAI/pythia-14m-deduped"))
    sources = "{a: {weight: 1, data: {class_path: PythonStdlib, init_args: {vocab_size: 4096}}}}"
    Path("mixture.yaml").write_text(f"data: {{class_path: Mixture, init_args: {{sources: {sources}}}}}")
    check_each(lambda words, expected: None if read(words).tokenizer_dir == expected else pytest.fail(words), [
        ("tiny-llama-1.1b", folder),
        ("TinyLlama-1.1B-Chat-v1.0 --data Alpaca2k", folder),
        ("EleutherAI/pythia-14m-deduped", mine),
        ("tiny-llama-1.1b --tokenizer_dir other", "other"),
        ("tiny-llama-1.1b --data TextFiles --data.train_data_path text.txt --data.vocab_size 300", None),
        ("tiny-llama-1.1b --data PythonStdlib --data.vocab_size 4096", None),  # the default, but set
        ("tiny-llama-1.1b --data HuggingFaceText --data.path text.txt --data.vocab_size 4096", None),
        ("tiny-llama-1.1b --config mixture.yaml", None),
        ("tiny-llama-1.1b --data HuggingFaceText --data.path text.txt", folder),
        ("tiny-llama-1.1b --model_config.vocab_size 300", None),
        ("tiny-llama-1.1b --data SyntheticTokens", None),
        ("pico-llama", None),
    ])  # fmt: skip


def test_without_it_the_line_has_the_command(here):
    with pytest.raises(UserError, match=f"`toolkit download {TINY} --tokenizer_only` downloads"):
        check_start(read("tiny-llama-1.1b --data Alpaca2k"))
    lines: list[str] = []
    args = read("tiny-llama-1.1b --data TextFiles --data.train_data_path text.txt --train.global_batch_size 1")
    prepare_data(args, 8, lines.append)
    assert lines[0].startswith("note: ") and f"`toolkit download {TINY} --tokenizer_only`" in lines[0]


def test_published_architectures_know_their_repository():
    unpublished = ("mini-llama", "pico-llama", "gopher-44m", "gpt-mini", "gpt-micro", "gpt-nano")
    without_tokenizer_json = ("llama-", "open_llama", "longchat", "vicuna", "Nous-Hermes")
    unknown = [name for name in list_names() if repository_of(name) is None]
    assert [name for name in unknown if not name.startswith((*unpublished, *without_tokenizer_json))] == []
    assert all(get_config(repository_of(name)).name == name for name in list_names() if name not in unknown
               and name.partition("-")[0] not in ("tiny", "micro"))  # fmt: skip
