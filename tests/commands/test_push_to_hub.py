"""`toolkit convert_to_hf --push_to_hub`, to a hub on this machine: what is uploaded, and the refusals."""

import json
import os

import pytest
import torch
import yaml
from huggingface_hub import constants

from tests.checkpoints.test_adapters import make, write_base
from tests.commands.test_download import contents, hub  # noqa: F401 (a fixture)
from tests.models.test_lora import base
from toolkit.checkpoints.folder import load_model
from toolkit.checkpoints.hf import export_hf as export_module
from toolkit.checkpoints.hf.origin import ORIGIN_FILE
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.io.safe_parse import write_yaml
from toolkit.ui.loggers import COLUMNS


@pytest.fixture
def trained(hub, tmp_path, monkeypatch):  # noqa: F811
    """The checkpoint of a finetuning run on a model from the hub, and the hub."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    run = tmp_path / "run"
    base_dir = tmp_path / "checkpoints" / "acme" / "base"
    for folder in (run / "final", base_dir):
        write_base(folder, base())
        train_bpe(["a text"], 270).save(folder)
    write_yaml(base_dir / ORIGIN_FILE, {"repo_id": "acme/base", "revision": "main", "commit": "abc"})
    settings = {
        "checkpoint_dir": "acme/base",
        "data": {"class_path": "JSON", "init_args": {"json_path": "/home/alice/pairs.json"}},
        "train": {"max_steps": 2, "learning_rate": 0.01, "epochs": None},
        "out_dir": "/home/alice/run", "log": {"project": "internal"}, "tokenizer_dir": "~/tok", "seed": 7,
    }  # fmt: skip
    (run / "final" / "hyperparameters.yaml").write_text(yaml.safe_dump(settings))
    (run / "final" / "trainer").mkdir()
    (run / "final" / "trainer" / "meta.json").write_text(json.dumps({"step": 2}))
    (run / "logs").mkdir()
    rows = ["1,50,4.5,,,,,,,,,1", "2,100,4.25,,,,,,4.125,,,2", "3,150,1.5,,,,,,1.25,,,3"]
    (run / "logs" / "metrics.csv").write_text("\n".join([",".join(COLUMNS), *rows, ""]))
    hub.add("acme/base", {})
    hub.cards["acme/base"] = {"license": "other", "license_name": "acme-1"}
    return run / "final", hub


def command(folder, name, *options):
    return ["convert_to_hf", str(folder), name, "--verify_checkpoint", "false", "--push_to_hub", "me/mine", *options]


def uploaded(server, repo="me/mine"):
    return server.commits[repo, server.branches[repo, "main"]]


def test_uploads_a_private_repository_with_a_card(trained, tmp_path, capsys):
    folder, server = trained
    assert main(command(folder, "hf")) == 0, capsys.readouterr().err
    assert f"wrote hf\nuploaded to {server.url}/me/mine\n" in capsys.readouterr().out
    assert uploaded(server) == contents(tmp_path / "hf") and server.is_private == {"me/mine": True}
    assert server.tokens == {"Bearer hf_secret"}
    front, text = (tmp_path / "hf" / "README.md").read_text().split("---\n")[1:]
    assert yaml.safe_load(front) == {
        "library_name": "transformers", "pipeline_tag": "text-generation", "base_model": "acme/base",
        "license": "other", "license_name": "acme-1",
    }  # fmt: skip
    for line in (
        "| Base model | [acme/base](https://huggingface.co/acme/base) |", "| Data | JSON pairs.json |",
        "| Trained | 2 steps, 100 tokens |", "| Training loss (last step) | 4.25 |", "| Validation loss | 4.125 |",
        'AutoModelForCausalLM.from_pretrained("me/mine")',
    ):  # fmt: skip
        assert line in text
    assert "alice" not in text and "internal" not in text and "hf_secret" not in text
    # what the hub holds comes back as the same model, and the card's command is complete
    assert main(["download", "me/mine", "--out_dir", "again"]) == 0, capsys.readouterr().err
    again, expected = load_model(tmp_path / "again").state_dict(), load_model(folder).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    capsys.readouterr()
    (tmp_path / "settings.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    assert "`toolkit finetune_full acme/base --config settings.yaml` repeats" in text
    assert main(["finetune_full", "acme/base", "--config", "settings.yaml", "--print_config"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["seed"], resolved["train"]["max_steps"], resolved["train"]["epochs"]) == (7, 2, None)


def test_second_upload_replaces_the_weights(trained, monkeypatch, refusal):
    folder, server = trained
    with monkeypatch.context() as patch:
        patch.setattr(export_module, "MAX_SHARD_BYTES", 60_000)
        assert main(command(folder, "many", "--private", "false")) == 0
    assert "model.safetensors.index.json" in uploaded(server) and server.is_private == {"me/mine": False}
    server.add("me/mine", uploaded(server) | {"adapter_model.safetensors": b"x"})
    assert "--push_to_hub me/mine: exists and is public; give --private false" in refusal(*command(folder, "one"))
    assert not os.path.exists("one")
    assert main(command(folder, "one", "--private", "false")) == 0
    weights = {name for name in uploaded(server) if "safetensors" in name}
    assert weights == {"model.safetensors", "adapter_model.safetensors"}
    server.is_private["me/mine"] = True
    assert "exists and is private; remove --private false, or another name" in refusal(
        *command(folder, "two", "--private", "false")
    )


def test_adapters(trained, tmp_path, capsys, refusal):
    _, server = trained
    _, folder, _ = make(tmp_path / "adapters")
    command = ["convert_to_peft", str(folder), "--push_to_hub", "me/lora"]
    assert main([*command, "local"]) == 2
    assert "--push_to_hub me/lora: not uploaded: the base " in one_line(capsys) and (tmp_path / "local").exists()
    assert ("me/lora", "main") not in server.branches
    assert main([*command, "peft", "--base_model", "acme/base"]) == 0, capsys.readouterr().err
    assert uploaded(server, "me/lora") == contents(tmp_path / "peft") and server.is_private == {"me/lora": True}
    card = (tmp_path / "peft" / "README.md").read_text()
    assert "library_name: peft" in card and 'AutoPeftModelForCausalLM.from_pretrained("me/lora")' in card
    assert "--private false: has no effect without --push_to_hub" in refusal(
        "convert_to_peft", folder, "x", "--private", "false"
    )


def one_line(capsys) -> str:
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("toolkit convert_to_")]
    return line


def test_refusals_before_converting(trained, monkeypatch, refusal):
    folder, server = trained
    for name in ("mine", "me/my model", "me/a--b", "me/a.git", "a/b/c", "", "/x"):
        assert f"--push_to_hub {name}: not a valid hub name; give USER/NAME" in refusal(
            *command(folder, "hf"), "--push_to_hub", name
        )
    assert "--private false: has no effect without --push_to_hub" in refusal(
        "convert_to_hf", folder, "hf", "--private", "false"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "which disables uploads; unset it" in refusal(*command(folder, "hf"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    assert "--push_to_hub me/mine: needs a token that may write; set HF_TOKEN" in refusal(*command(folder, "hf"))
    assert not os.path.exists("hf") and not server.tokens - {"Bearer hf_secret"}


def test_failed_upload_keeps_the_folder(trained, tmp_path, capsys):
    folder, server = trained
    for what, status, reason in [
        ("create", 403, "refuses the token (status 403); log in with `hf auth login` or set HF_TOKEN to one that may"),
        ("preupload", 413, "no upload to http://127.0.0.1"),
        ("commit", 400, "no upload to http://127.0.0.1"),
    ]:
        server.refused_writes = {what: status}
        assert main(command(folder, what)) == 2
        line = one_line(capsys)
        assert reason in line and f"{what} is complete; to upload it later, run `hf upload me/mine {what} ." in line
        assert (tmp_path / what / "model.safetensors").exists() and "hf_secret" not in line
