"""Path options: no URL becomes a local folder, and no symlink leads out of a model's folder."""

import importlib
import os
import re
import sys
from pathlib import Path

import pytest
from helpers.cases import check_each

import toolkit
from tests.checkpoints.test_adapters import make
from tests.commands.test_consolidate import make_checkpoint, shard
from toolkit.cli import main
from toolkit.commands import TRAINING, all_commands
from toolkit.config.command import CommandOptions
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.extension import registered
from toolkit.io.paths import is_path_option

NO_PATHS = {
    "base_model", "best_by", "callbacks", "checkpoint_dirs", "claim", "class_weights", "columns", "command", "compiler",
    "family", "family_options", "gpu", "group", "host", "image", "label_column", "latent_attention", "linear_attention",
    "logger_name",
    "metric", "model_name", "name", "options", "part", "project", "prompt", "prompt_style", "push_to_hub", "repo_id",
    "revision", "rope_adjustments", "run", "run_dirs", "secrets", "shell", "sources", "split", "split_names",
    "strategy", "subset", "system", "tasks", "text_column", "text_pair_column", "time", "val_split", "wrap_classes",
}  # fmt: skip


def path_options() -> list[tuple[str, list[str], str]]:
    """Return (command, words that choose the data, option) of every string option of toolkit that is a path."""
    found = []
    for name, subcommand in all_commands().items():
        if subcommand.wraps_training:
            continue  # the options of another command
        command = CommandOptions(subcommand.load())
        kinds = [(group, kind) for group in command.class_options for kind in command.choices(group).items()] or [None]
        for chosen in kinds:
            words = []
            if chosen is not None:
                group, (short, cls) = chosen
                command.selected[group], words = cls, [f"--{group}", short]
            for option, (kind, *_) in command.options().items():
                group, _, field = option.rpartition(".")
                is_builtin = group not in registered("option_groups")  # packages may be installed
                is_local = field not in getattr(command.selected.get(group), "takes_urls", ())
                if is_builtin and is_local and re.search(r"\bstr\b", str(kind)) and field not in NO_PATHS:
                    found.append((name, words, option))
    return found


def test_url_in_place_of_a_path_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = [*path_options(), ("pretrain", [], "config")]
    assert {"out_dir", "data.cache_dir", "resume", "checkpoint_dir", "hf_dir", "from_peft"} <= {o for *_, o in options}
    for name, _, option in options:
        assert is_path_option(option), f"{option} of {name}: neither a path nor in NO_PATHS"
    once = {option if "." in option else (name, option): (name, words, option) for name, words, option in options}
    remote = ("checkpoint_dir", "initial_checkpoint_dir", "base_checkpoint_dir", "resume")
    for name, words, option in once.values():
        if option in remote or (option == "out_dir" and name in (*TRAINING, "prepare_data")):
            assert main([name, *words, f"--{option}", "s3://bucket"]) == 2
            expected = f"--{option} s3://bucket: must name a folder in a bucket, such as s3://bucket/run"
        else:
            assert main([name, *words, f"--{option}", "s3://bucket/x"]) == 2
            expected = f"--{option} s3://bucket/x: must not be on remote storage; use a local folder"
        assert capsys.readouterr().err == f"toolkit {name}: {expected}\n"
    assert not any(tmp_path.iterdir())


def test_url_of_remote_storage_that_cannot_be_meant_is_an_error(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)  # another test may have imported it

    def check(flags, expected):
        shown = refusal("pretrain", "pico-llama", "--train.max_steps", "1", *flags)
        assert expected in shown and "secret" not in shown

    url = "s3://bucket/run"
    cases = {
        ("--out_dir", "s3://key:secret@bucket/run"): "--out_dir s3://bucket/run: must not contain a user name, a pass",
        ("--data.cache_dir", "s3://key:secret@b/x"): "--data.cache_dir s3://b/x: must not be on remote storage",
        ("--out_dir", "s3:/bucket/run"): "is not a URL; give it as a string such as s3://bucket/run",
        ("--out_dir", "s3://bucket/run/../other"): "must name a folder in a bucket",
        ("--out_dir", url): f"--out_dir {url}: needs a package that is not installed (Install s3fs to access S3)",
        ("--resume", url): f"--resume {url}: needs a package that is not installed (Install s3fs to access S3)",
        ("--out_dir", "nfs2://bucket/run"): "--out_dir nfs2://bucket/run: unknown kind of storage",
        ("--out_dir", "https://host/run"): "--out_dir https://host/run: runs cannot be stored on https://",
        ("--staging_dir", "x"): "--staging_dir x: has no effect with the local --out_dir out/pretrain; remove it",
    }
    check_each(check, list(cases.items()))
    assert f"checkpoint_dir {url}: needs a package" in refusal("generate", url, "--prompt", "a")
    assert f"must be a local folder for the merged model of {url}" in refusal("merge_lora", url)


def test_url_in_a_yaml_file_and_from_python_is_an_error(tmp_path, monkeypatch, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("out_dir: gs://bucket\n")
    assert "run.yaml: out_dir gs://bucket: must name a folder in a bucket" in refusal(
        "pretrain", "--config", "run.yaml"
    )
    for out_dir in ("s3://x", Path("s3://x/y"), "hdfs:/x"):
        with pytest.raises(UserError, match=f"out_dir {out_dir}: (must name a folder|is not a URL)"):
            toolkit.train(out_dir=out_dir, train={"max_steps": 1})
    with pytest.raises(UserError, match="cache_dir s3://x: must not be on remote storage"):
        toolkit.train(data=toolkit.data.PythonStdlib(cache_dir="s3://x"))
    with pytest.raises(UserError, match="checkpoint_dir s3://x: must name a folder in a bucket"):
        toolkit.load("s3://x")


def test_prompt_may_be_a_url(tmp_path, refusal):
    assert "none: no such folder" in refusal("generate", tmp_path / "none", "--prompt", "https://example.com says")


def test_symlink_out_of_a_model_folder_is_not_exported(tmp_path, capsys):
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    _, adapters, _ = make(tmp_path)
    plain = make_checkpoint(tmp_path / "plain")
    sharded = shard(plain, tmp_path / "sharded")
    commands = [("convert_to_peft", adapters), ("merge_lora", adapters), ("convert_to_hf", plain),
                ("consolidate", sharded)]  # fmt: skip
    for name in ("tokenizer.notes", "additional_chat_templates"):
        for command, folder in commands:
            (folder / name).symlink_to(secret if name == "tokenizer.notes" else tmp_path)
            out_dir = tmp_path / f"out-{command}"
            flag = ["--out_dir"] if command == "merge_lora" else []
            assert main([command, str(folder), *flag, str(out_dir)]) == 2, (command, name)
            shown = capsys.readouterr().err
            assert f"{folder / name}" in shown and "outside its folder" in shown and shown.count("\n") == 1
            assert not out_dir.exists()
            (folder / name).unlink()


def test_hub_cache_snapshot_is_read(tmp_path):
    """Its files are symlinks to blobs outside the snapshot."""
    plain, repo = make_checkpoint(tmp_path / "plain"), tmp_path / "models--a--b"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for i, file in enumerate([f for f in plain.rglob("*") if f.is_file()]):
        link, blob = snapshot / file.relative_to(plain), repo / "blobs" / str(i)
        link.parent.mkdir(exist_ok=True)
        file.rename(blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (tmp_path / "link").symlink_to(snapshot)
    assert Tokenizer.load(tmp_path / "link").vocab_size == Tokenizer.load(snapshot).vocab_size > 0
    assert main(["convert_to_hf", str(snapshot), str(tmp_path / "hf")]) == 0
    assert not any(file.is_symlink() for file in (tmp_path / "hf").iterdir())
    outside = os.path.relpath(tmp_path / "secret", snapshot)
    (tmp_path / "secret").write_text("secret")
    (snapshot / "tokenizer.notes").symlink_to(outside)
    with pytest.raises(UserError, match="outside its folder"):
        Tokenizer.load(snapshot)
