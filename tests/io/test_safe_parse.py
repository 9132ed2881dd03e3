"""Untrusted files: no size, nesting, number, alias or file type crashes or hangs the process."""

import os
import signal

import pytest

from toolkit.io.safe_parse import parse_json, parse_yaml, read_json, read_yaml

LAUGHS = "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_excessive_content_is_a_value_error():
    for parse in (parse_json, parse_yaml):
        for deep in (70, 100_000):
            with pytest.raises(ValueError, match="nested more than 64 levels deep"):
                parse("[" * deep + "]" * deep)
        with pytest.raises(ValueError, match="contains a number of 5,000 digits"):
            parse("[" + "9" * 5000 + "]")
    with pytest.raises(ValueError, match="has more than 200,000 values after alias expansion"):
        parse_yaml(LAUGHS)
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_yaml("&a [*a]")
    with pytest.raises(ValueError, match="could not determine a constructor"):
        parse_yaml("!!python/object/apply:os.getcwd []")
    for text in ("!!int _", "!!float ._", "!!timestamp 99999-99-99", "!!binary a", "2020-02-31", "!!bool maybe"):
        with pytest.raises(ValueError):
            parse_yaml(text)


def test_usual_content_is_read():
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}')["model_max_length"] > 1e29
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: [1.5, null, x]}")["c"] == {"b": 1, "d": [1.5, None, "x"]}
    assert parse_yaml("") is None


def test_large_file_is_not_read(tmp_path):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.truncate(2**40)
    for read in (read_json, read_yaml):
        with pytest.raises(ValueError, match="the maximum for a (JSON|YAML) file"):
            read(path)


def test_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    signal.alarm(100)
    try:
        for read in (read_json, read_yaml):
            for path in (tmp_path / "pipe", "/dev/zero"):
                with pytest.raises(OSError, match="not a regular file"):
                    read(path)
    finally:
        signal.alarm(0)


def test_config_aliases_are_bounded(tmp_path, refusal):
    path = tmp_path / "config.yaml"
    path.write_text(LAUGHS + "data: {class_path: TextFiles, init_args: {train_data_path: *i}}\n")
    assert "after alias expansion" in refusal("pretrain", "--config", path, "--print_config")
