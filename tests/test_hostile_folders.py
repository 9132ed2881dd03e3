"""Untrusted model folders and unwritable paths: one-line errors, bounded time and memory."""

import errno
import io
import os
import resource
import signal
import subprocess
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from helpers.sealing import seal
from toolkit_metric.evaluate import data_of_run

from tests.checkpoints.test_adapters import make
from tests.commands.test_consolidate import make_checkpoint, shard
from toolkit.checkpoints.adapters import read_adapter_info
from toolkit.checkpoints.folder import read_model_config
from toolkit.checkpoints.lock import exclusive_lock, require_unlocked
from toolkit.checkpoints.run.resume import resolve_resume
from toolkit.checkpoints.run.shard_metadata import read_metadata
from toolkit.checkpoints.run.sharded import read_sharded
from toolkit.checkpoints.store import newest
from toolkit.checkpoints.weights import load_state, load_weights
from toolkit.cli import main
from toolkit.data import PythonStdlib
from toolkit.data.tokenizer import Tokenizer
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.families import config_from_hf
from toolkit.training.checkpoint_meta import read_meta
from toolkit.ui.loggers import MetricsCSV


@pytest.fixture
def adapters(tmp_path) -> Path:
    return make(tmp_path)[1]


@contextmanager
def time_limit():
    """Ends the test process if a test hangs."""
    signal.alarm(200)
    try:
        yield
    finally:
        signal.alarm(0)


def refused(read, path) -> str:
    with pytest.raises(UserError) as error:
        read(path)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message


READERS = {
    "tokenizer_config.json": Tokenizer.load, "special_tokens_map.json": Tokenizer.load,
    "generation_config.json": Tokenizer.load, "adapter.yaml": read_adapter_info, "model_config.yaml": read_model_config,
}  # fmt: skip


@pytest.mark.slow
def test_nesting_and_long_numbers_in_model_files(adapters):
    for name, read in READERS.items():
        content = (adapters / name).read_bytes()
        for text, message in (("[" * 50_000, "nested more than"), ("[" + "9" * 5000 + "]", "5,000 digits")):
            (adapters / name).write_text(text)
            shown = refused(read, adapters)
            assert name in shown and message in shown
        (adapters / name).write_bytes(content)
        read(adapters)


def test_control_sequences_of_a_folder_reach_no_terminal(tmp_path, capsys):
    base, adapters, _ = make(tmp_path)
    for folder, name, key in ((base, "model_config.yaml", "name"), (adapters, "adapter.yaml", "base_absolute_path")):
        values = yaml.safe_load((folder / name).read_text())
        (folder / name).write_text(yaml.safe_dump(values | {key: "a\x1b]0;title\x07b\nmodel: forged"}))
        seal(folder)
        assert main(["convert_to_hf", str(folder), str(tmp_path / "out")]) == 2
        shown = capsys.readouterr()
        assert "\x1b" not in shown.out + shown.err and shown.err.count("\n") == 1 and "printable" in shown.err


def test_messages_are_printable_bounded_and_without_secrets(tmp_path, capsys):
    config = tmp_path / "config.yaml"
    config.write_text("hf_tokn: hunter2")
    for words, expected in (
        (["--" + "x" * 10**6, "1"], " ... "),
        (["--hf_token", "hunter2"], "--hf_token: no such option"),
        (["--hf_tokn", "hunter2"], "--hf_tokn: no such option"),
        (["--hf_tokn=hunter2"], "--hf_tokn: no such option"),
        (["-hf_tokn=hunter2"], "-hf_tokn: unexpected word"),
        (["--config", str(config)], "hf_tokn: no such option"),
        (["--seed", "\x1b[2J"], "--seed \\x1b[2J: must be an integer"),
        (["--data", "HuggingFaceText", "--data.path", "https://host/a.jsonl#token=hunter2"], "contains credentials"),
        (["--data", "HuggingFaceText", "--data.path", "https://host/a.jsonl?pwd=hunter2"], "contains credentials"),
        *(
            (["--data", "HuggingFaceText", "--data.path", f"https://host/a.jsonl?{name}=hunter2"], "or a query")
            for name in ("bearer", "code", "jwt", "raw=1&x", "")
        ),
        (["--seed", "simplecache::https://me:hunter2@host/a"], "--seed simplecache::https://host/a: must be an"),
        (["--HF_TOKEN", "A", "--HF_TOKEN", "hunter2"], "--HF_TOKEN: given 2 times"),
        (["--seed", "1", "--seed", "\x1b[2J"], "--seed \\x1b[2J: must be"),
        (["--" + "x" * 10**5, "1"] * 2, " ... "),
        (["--data.json_path", "https://h/a.json?pwd=hunter2"], "--data.json_path: no such option"),
        (["--data.where", "https://h/a.json?pwd=hunter2"], "--data.where: no such option"),
        (["--resume", "s3://b/a#token=hunter2"], "--resume s3://b/a?***: must not contain"),
    ):
        assert main(["pretrain", "pico-llama", "--train.max_steps", "1", *words]) == 2
        shown = capsys.readouterr().err
        assert expected in shown and "hunter2" not in shown and "\x1b" not in shown and len(shown) < 6000, shown[:300]


def test_pipes_instead_of_files_do_not_hang(tmp_path):
    _, adapters, _ = make(tmp_path)
    sharded = shard(make_checkpoint(tmp_path / "plain"), tmp_path / "sharded")
    readers = [
        (adapters / "model_config.yaml", lambda: read_model_config(adapters)),
        (adapters / "adapter.yaml", lambda: read_adapter_info(adapters)),
        (tmp_path / "plain/lit_model.pth", lambda: load_weights(tmp_path / "plain")),
        (tmp_path / "plain/trainer/state.pth", lambda: load_state(tmp_path / "plain/trainer/state.pth")),
        (sharded / "lit_model.pth/.metadata", lambda: read_sharded(sharded / "lit_model.pth")),
    ]
    with time_limit():
        for path, read in readers:
            path.unlink()
            os.mkfifo(path)
            with pytest.raises(UserError, match="not a regular file"):
                read()
        os.mkfifo(tmp_path / "metrics.csv")
        with pytest.raises(UserError, match="metrics.csv: not a regular file"):
            MetricsCSV(tmp_path / "metrics.csv", resume_step=1)
        for name in ("trainer/meta.json", "hyperparameters.yaml", ".lock"):
            (sharded / name).unlink(missing_ok=True)
            os.mkfifo(sharded / name)
        assert newest(tmp_path) == tmp_path / "plain" or newest(tmp_path) is None  # reads meta.json
        assert isinstance(data_of_run(sharded, trust=False)[0], PythonStdlib)
        with pytest.raises(UserError, match="meta.json: damaged: .*not a regular file"):
            read_meta(sharded)
        require_unlocked(sharded)
        with pytest.raises(UserError, match="give a folder that can be written"), exclusive_lock(sharded):
            pass


def test_oversized_configs_are_refused_before_building(capsys):
    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    with time_limit():
        for n in (1025, 30_000, 10**9, 10**18):
            with pytest.raises(UserError, match=f"num_hidden_layers {n}: must be at most 1,024"):
                config_from_hf({**llama, "vocab_size": 64, "num_hidden_layers": n})
            with pytest.raises(UserError, match=f"n_layer {n}: must be at most 1,024"):
                ModelConfig(n_layer=n)
    with pytest.raises(UserError, match="n_expert 1000000: must be at most 1,024 in each of the 128 layers"):
        ModelConfig(mlp_class_name="LLaMAMoE", n_expert=1_000_000, n_expert_per_token=1, n_layer=128)
    assert main(["pretrain", "pico-llama", "--model_config.n_embd", "1000000000"]) == 2
    shown = capsys.readouterr().err
    assert shown == "toolkit pretrain: --model_config.n_embd 1000000000: must be at most 16,777,216\n"


def test_compressed_and_overlapping_entries_are_refused(tmp_path):
    """torch stores entries uncompressed; a zip bomb is a small file with large entries."""
    plain, packed = io.BytesIO(), tmp_path / "lit_model.pth"
    torch.save({"a": torch.zeros(1_000_000)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert packed.stat().st_size < 20_000
    with pytest.raises(UserError, match="refused: its contents are compressed"):
        load_state(packed)
    with zipfile.ZipFile(io.BytesIO(plain.getvalue())) as source, open(packed, "wb") as file:
        target = zipfile.ZipFile(file, "w")
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
        target.filelist += [entry for entry in target.filelist if entry.file_size > 1_000] * 9
        target.close()
    with pytest.raises(UserError, match="refused: its contents are compressed"):
        load_state(packed)


def test_compressed_entries_in_shards_are_refused(tmp_path):
    """A shard file has a zip per tensor; here one is replaced by a compressed zip of the same content."""
    folder = shard(make_checkpoint(tmp_path / "plain"), tmp_path / "sharded") / "lit_model.pth"

    place = max(read_metadata(folder).storage_data.values(), key=lambda place: place.length)
    content = bytearray((folder / place.relative_path).read_bytes())
    part, small = content[place.offset : place.offset + place.length], b""
    for _ in range(2):  # the second time with a comment that fills it up to the old length
        packed, comment = io.BytesIO(), bytes(place.length - len(small)) if small else b""
        with zipfile.ZipFile(io.BytesIO(part)) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
            for entry in source.infolist():
                target.writestr(entry.filename, source.read(entry))
            target.comment = comment
        small = packed.getvalue()
    content[place.offset : place.offset + place.length] = small
    (folder / place.relative_path).write_bytes(content)
    with pytest.raises(UserError, match="refused: its contents are compressed"):
        read_sharded(folder)


def test_symlink_as_lock_does_not_modify_its_target(tmp_path):
    target, out_dir = tmp_path / "thesis.tex", tmp_path / "out"
    target.write_text("years of work")
    out_dir.mkdir()
    (out_dir / ".lock").symlink_to(target)
    with pytest.raises(UserError, match=r"--out_dir .*/out: .*its .lock is a symbolic link; delete it"):
        with exclusive_lock(out_dir):
            pass
    require_unlocked(out_dir)
    assert target.read_text() == "years of work"


def test_data_named_by_a_checkpoint_needs_the_trust_flag(tmp_path, corpus, capsys, refusal):
    folder, cache = make_checkpoint(tmp_path / "model"), tmp_path / "cache"

    def name_data(cls: str, **options) -> None:
        values = {"data": {"class_path": cls, "init_args": options}, "train": {"max_seq_length": 8}}
        (folder / "hyperparameters.yaml").write_text(yaml.safe_dump(values))
        seal(folder)  # as a stranger can

    command = ["evaluate", str(folder), "--accelerator", "cpu", "--eval.max_iters", "1"]
    for cls, options, shown in (
        ("TextFiles", {"train_data_path": "/etc/passwd"}, "data.train_data_path /etc/passwd"),
        ("PythonStdlib", {"cache_dir": str(cache)}, f"data.cache_dir {cache}"),
        ("HuggingFace", {"repo_id": "/etc"}, "data.repo_id /etc"),
        ("Preference", {"json_path": "", "repo_id": "/etc"}, "data.repo_id /etc"),  # "": unset in earlier versions
        ("LitData", {"data_path": "/etc"}, "data.data_path /etc"),
    ):
        name_data(cls, **options)
        assert main(command) == 2
        line = capsys.readouterr().err
        assert f"names {shown}: " in line and "--trust_checkpoint_data true" in line and line.count("\n") == 1
    assert not cache.exists()
    name_data("PythonStdlib", cache_dir=None, num_workers=0)
    data, length = data_of_run(folder, trust=False)
    assert isinstance(data, PythonStdlib) and length == 8
    name_data("TextFiles", train_data_path=str(corpus), cache_dir=str(cache), val_fraction=0.2)
    assert main([*command, "--trust_checkpoint_data", "true"]) == 0
    assert cache.exists() and "TextFiles, val" in capsys.readouterr().out
    assert "has no effect with --data" in refusal(*command, "--trust_checkpoint_data", "true", "--data", "PythonStdlib")


def test_out_dir_without_permission_is_a_one_line_error(tmp_path, capsys):
    locked = tmp_path / "locked"
    (locked / "run").mkdir(parents=True)
    locked.chmod(0o700)
    (tmp_path / "hidden").mkdir(mode=0)
    command = ["pretrain", "pico-llama", "--data", "SyntheticTokens", "--train.max_steps", "1", "--accelerator", "cpu"]
    if root := os.geteuid() == 0:
        os.seteuid(65534)  # to whom all of pytest's folders are closed, too
    else:
        locked.chmod(0)
    try:
        for out_dir in (locked / "run", locked / "new", tmp_path / "hidden"):
            for resume in (False, "auto", True):
                with pytest.raises(UserError, match=f"--out_dir {out_dir}: Permission denied; give a folder"):
                    resolve_resume(resume, out_dir)
        assert main([*command, "--out_dir", str(locked / "new")]) == 2
    finally:
        if root:
            os.seteuid(0)
        locked.chmod(0o700)
    shown = capsys.readouterr().err
    assert f"--out_dir {locked / 'new'}: Permission denied" in shown and "Traceback" not in shown


@contextmanager
def full_disk(path: Path):
    """A full file system at ``path`` if it can be mounted, otherwise a limit on file sizes."""
    path.mkdir()
    is_mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "none", path], capture_output=True
    ).returncode
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if not is_mounted:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if is_mounted:
            subprocess.run(["umount", path], check=True)


def test_conversion_on_a_full_disk_is_a_one_line_error(tmp_path, refusal):
    _, adapters, _ = make(tmp_path)
    sharded = shard(make_checkpoint(tmp_path / "plain"), tmp_path / "sharded")
    (sharded / "tokenizer.json").write_bytes(bytes(20_000))
    seal(sharded)
    with full_disk(tmp_path / "disk"):
        for command, folder in (("convert_to_peft", adapters), ("consolidate", sharded)):
            shown = refusal(command, folder, tmp_path / "disk/out")
            assert shown.startswith(f"toolkit {command}: out_dir {tmp_path / 'disk/out'}: ")
            assert "No space left on device" in shown or "File too large" in shown
            assert not list((tmp_path / "disk").iterdir())


def test_a_disk_that_is_full_at_the_lock_is_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", fail)
    with pytest.raises(UserError, match=r"--out_dir .*: cannot write .lock: No space left on device"):
        with exclusive_lock(tmp_path / "run"):
            pass
