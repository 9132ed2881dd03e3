"""S7 verified-bytes: the manifest of a checkpoint folder."""

import json
from unittest.mock import Mock

import pytest
from helpers.damage import flip
from helpers.saving import write_checkpoint

from toolkit.checkpoints import manifest
from toolkit.checkpoints.finite import nonfinite_state
from toolkit.checkpoints.manifest import DamagedCheckpointError, read_manifest, replace_in_manifest, require_intact
from toolkit.checkpoints.store import prune, write_file
from toolkit.data.tokenizer import Tokenizer, train_bpe
from toolkit.errors import UserError


@pytest.fixture
def folder(tmp_path):
    def write(tmp):
        (tmp / "trainer").mkdir()
        (tmp / "trainer" / "state.pth").write_bytes(b"state" * 1000)
        for name in ("lit_model.pth", "hyperparameters.yaml", "tokenizer.json"):
            (tmp / name).write_text(name)

    write_checkpoint(tmp_path / "step-1", write)
    return tmp_path / "step-1"


def test_manifest_lists_all_files_and_damage_is_named(folder, capsys):
    listed = read_manifest(folder)
    assert listed.keys() == {"lit_model.pth", "hyperparameters.yaml", "tokenizer.json", "trainer/state.pth"}
    require_intact(folder)
    (folder / "hyperparameters.yaml").write_text("seed: 1")  # an editable file
    require_intact(folder)
    for name in listed.keys() - {"hyperparameters.yaml"}:
        flip(folder / name)
    assert not capsys.readouterr().err
    with pytest.raises(DamagedCheckpointError, match="lit_model.pth .*tokenizer.json .*trainer/state.pth .*--verify"):
        require_intact(folder)


def test_folder_without_manifest_loads_with_a_note(folder, capsys):
    (folder / "COMPLETE").write_bytes(b"")  # of an older version
    (folder / "lit_model.pth").write_text("other")
    require_intact(folder)
    (note,) = capsys.readouterr().err.splitlines()
    assert str(folder) in note


def test_huge_files_are_not_read(folder):
    """Sparse ones, which take no disk."""
    train_bpe(["a text"], 270).save(folder)
    for name in ("COMPLETE", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        content = (folder / name).read_bytes() if (folder / name).exists() else None
        with open(folder / name, "ab") as file:
            file.truncate(30 * 2**30)
        with pytest.raises(UserError, match=f"{name}.*larger than [0-9,]+ bytes"):
            read_manifest(folder) if name == "COMPLETE" else Tokenizer.load(folder)
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)


def test_a_manifest_that_cannot_be_read_is_not_called_malformed(folder, monkeypatch):
    monkeypatch.setattr(manifest, "open_regular", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(
        DamagedCheckpointError, match="COMPLETE: cannot be read: Permission denied; check its permissions"
    ):
        read_manifest(folder)


def test_malformed_manifest_is_a_one_line_error(folder):
    good = json.loads((folder / "COMPLETE").read_text())
    outside = {"../other": good["files"]["lit_model.pth"]}
    texts = ["x", "[]", "{}", "[" * 100_000, json.dumps(good | {"files": outside}), json.dumps(good | {"files": 3})]
    for name in ("\ud800", "a\x1b[2Jb", "a\nb"):  # not a name of ours, and not for a terminal
        files = {name: good["files"]["lit_model.pth"]}
        texts.append(json.dumps(good | {"files": files, "crc32": manifest._crc32(files)}))
    for text in texts:
        (folder / "COMPLETE").write_text(text)
        with pytest.raises(DamagedCheckpointError, match="COMPLETE: damaged"):
            read_manifest(folder)
    (folder / "COMPLETE").write_text(json.dumps(good | {"format_version": 2}))
    with pytest.raises(UserError, match="format version 2") as error:
        read_manifest(folder)
    assert not isinstance(error.value, DamagedCheckpointError)  # not to be skipped


def test_replaced_or_added_file_is_listed(folder):
    for name in ("lit_model.pth", "config.json"):
        write_file(folder / name, lambda tmp: tmp.write_text("new"), flag="--out_dir")
        assert read_manifest(folder)[name]["size"] == 3
    require_intact(folder)


@pytest.mark.parametrize("writes", [0, 1])
def test_a_crash_while_a_file_is_replaced_leaves_no_damage(folder, monkeypatch, writes):
    real, count = manifest.write_manifest, iter(range(9))

    def crash(*args):
        if next(count) == writes:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(manifest, "write_manifest", crash)
    with pytest.raises(KeyboardInterrupt):
        replace_in_manifest(folder, "lit_model.pth", lambda: (folder / "lit_model.pth").write_text("replaced"))
    require_intact(folder)


def test_pruning_a_link_removes_it_and_nothing_else(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    write_checkpoint(tmp_path / "step-2", lambda tmp: (tmp / "lit_model.pth").write_text("w") and None)
    prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "step-2"]
    require_intact(elsewhere)


def test_nonfinite_tensors_are_named():
    import torch

    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4), "c": torch.nn.Linear(4, 4)})
    module["c"].requires_grad_(False).weight.data.fill_(float("-inf"))  # not trained: nothing that a step has done
    optimizer = torch.optim.AdamW(p for p in module.parameters() if p.requires_grad)
    sum(p.sum() for p in module.parameters() if p.requires_grad).backward()
    optimizer.step()
    optimizer.state[module["b"].weight]["exp_avg_sq"].fill_(3e38)  # its norm overflows, it does not
    module["a"].half().weight.data.fill_(6e4)
    assert nonfinite_state(module, optimizer) == []
    module["a"].float().weight.data.fill_(3e38)
    assert nonfinite_state(module, optimizer) == ["a.weight"], "no product with it is finite"
    module["a"].weight.data.fill_(1)
    for bad in (float("nan"), float("inf")):
        module["b"].bias.data[3] = bad
        optimizer.state[module["a"].weight]["exp_avg_sq"][0, 1] = bad
        assert sorted(nonfinite_state(module, optimizer)) == ["a.weight|exp_avg_sq", "b.bias"]
