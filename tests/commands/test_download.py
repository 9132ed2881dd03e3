"""`toolkit download`, from a hub on this machine: what is fetched and kept, and that every refusal is one line."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from helpers.hub_stub import Hub
from huggingface_hub import constants

from tests.checkpoints.test_adapters import write_base
from tests.models.test_lora import base
from toolkit.checkpoints.folder import find_checkpoint_dir, load_model
from toolkit.checkpoints.hf import export_hf as export_module
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe

INDEX = "model.safetensors.index.json"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(files in one piece, files in shards, the model)"""
    folder, model = tmp_path_factory.mktemp("exported"), base().eval()
    write_base(folder / "native", model)
    train_bpe(["a text"], 270).save(folder / "native")
    export_hf(folder / "native", folder / "one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "MAX_SHARD_BYTES", 60_000)
        export_hf(folder / "native", folder / "many")
    return contents(folder / "one"), contents(folder / "many"), model


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf_cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        files = constants.HUGGINGFACE_CO_URL_TEMPLATE
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + files[files.index("/{") :])
        yield hub


def refusal(capsys, *command: str) -> str:
    """The one line of a command that ends with 2."""
    capsys.readouterr()
    assert main(["download", *command]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("toolkit download: ")]
    assert len(lines) == 1
    return lines[0]


def same_weights(folder, model) -> bool:
    reference, native = load_model(folder).state_dict(), model.state_dict()
    return reference.keys() == native.keys() and all(torch.equal(reference[name], native[name]) for name in native)


@pytest.mark.slow
def test_subprocess_downloads_and_converts(hub, exported, tmp_path):
    one, _, model = exported
    template = "additional_chat_templates/tool.jinja"
    unwanted = dict.fromkeys(
        ["pytorch_model.bin", "README.md", "consolidated.safetensors", "tokenizer/model.onnx", "modeling_tiny.py"], b"x"
    )
    commit = hub.add("org/tiny", one | unwanted | {template: b"{{ messages }}"})
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": "hf_secret",
    }
    done = subprocess.run(
        [sys.executable, "-m", "toolkit", "download", "org/tiny"],
        env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"downloading org/tiny at commit {commit}" in done.stdout
    assert done.stdout.endswith("wrote checkpoints/org/tiny\n")
    folder = find_checkpoint_dir("org/tiny")
    assert same_weights(folder, model)
    assert (folder / "tokenizer.json").read_bytes() == one["tokenizer.json"]
    assert (folder / template).is_file()
    assert yaml.safe_load((folder / "download.yaml").read_text()) == {
        "repo_id": "org/tiny", "revision": "main", "commit": commit,
    }  # fmt: skip
    assert not {*unwanted} & {*hub.fetched()}
    assert [p.name for p in (tmp_path / "checkpoints" / "org").iterdir()] == ["tiny"]
    assert hub.tokens == {"Bearer hf_secret"}
    assert not any(b"hf_secret" in content for content in contents(folder).values())
    assert "hf_secret" not in done.stdout + done.stderr


def test_revision_dtype_and_out_dir(hub, exported, tmp_path):
    one, _, _ = exported
    hub.add("tiny", {"README.md": b"#"})
    commit = hub.add("tiny", one, branch="refs/pr/1")
    for revision in ("refs/pr/1", commit):
        out_dir = tmp_path / revision.replace("/", "-")
        options = ["--revision", revision, "--out_dir", str(out_dir), "--dtype", "bfloat16"]
        assert main(["download", "tiny", *options]) == 0
        assert load_model(out_dir).lm_head.weight.dtype == torch.bfloat16
        record = yaml.safe_load((out_dir / "download.yaml").read_text())
        assert (record["revision"], record["commit"]) == (revision, commit)


def test_convert_false_keeps_the_hf_folder(hub, exported, capsys):
    _, many, model = exported
    hub.add("org/tiny", many)
    assert "--dtype float32: has no effect" in refusal(capsys, "org/tiny", "--convert", "false", "--dtype", "float32")
    assert main(["download", "org/tiny", "--convert", "false"]) == 0
    found = contents(Path("checkpoints/org/tiny"))
    assert (
        found.pop("SHA256SUMS")
        and b"org/tiny" in found.pop("download.yaml")
        and found.items() <= many.items()
        and INDEX in found
    )
    assert os.listdir("checkpoints/org") == ["tiny"]
    assert main(["convert_from_hf", "checkpoints/org/tiny", "native"]) == 0
    assert same_weights(Path("native"), model) and Path("native/download.yaml").is_file()
    assert "already exists and is not empty" in refusal(capsys, "org/tiny")


def test_tokenizer_only_is_found_by_its_hub_name(hub, exported, capsys):
    one, _, _ = exported
    hub.add("tiny", one)
    hub.add("org/old", {"tokenizer.model": b"x"})
    Path("text.txt").write_text("some text\n" * 50)
    command = ["prepare_data", "--data", "TextFiles", "--data.train_data_path", "text.txt", "--data.cache_dir", "cache",
               "--max_seq_length", "8", "--tokenizer_dir"]  # fmt: skip
    assert main([*command, "tiny"]) == 2
    assert "--tokenizer_dir tiny: no such folder or file; `toolkit download tiny --tokenizer_only` downloads it" in (
        capsys.readouterr().err
    )
    assert main(["download", "--tokenizer_only", "tiny"]) == 0
    tokenizer_files = {name for name in one if re.match("tokenizer|special|generation", name)}
    assert {*hub.fetched()} == tokenizer_files
    assert contents(Path("checkpoints/tiny")).keys() == tokenizer_files | {"download.yaml", "SHA256SUMS"}
    assert main([*command, "tiny"]) == 0
    for flags, message in (
        (["org/old"], "repo_id org/old: holds no tokenizer.json (tokenizer.model alone is not supported)"),
        (["tiny", "--dtype", "float32"], "--dtype float32: has no effect with --tokenizer_only"),
        (["tiny", "--convert", "false"], "--convert false: has no effect with --tokenizer_only"),
    ):
        assert message in refusal(capsys, *flags, "--tokenizer_only")


def test_progress_is_visible_without_a_terminal(hub, exported, capfd):
    huggingface_hub.utils.enable_progress_bars()  # an upload in another test disables them
    hub.add("org/tiny", exported[0])
    assert main(["download", "org/tiny"]) == 0
    out, err = capfd.readouterr()
    assert re.match(r"downloading org/tiny at commit \w+: 6 files, [\d,]+ bytes\nconverting org/tiny to", out)
    assert "Fetching 6 files: 100%" in err

    hub.asked.clear()
    for flags in ([], ["--tokenizer_only"]):
        assert main(["download", "org/tiny", *flags]) == 0 and not hub.asked
        assert capfd.readouterr().out == "checkpoints/org/tiny exists; to download it again, remove it\n"
    for flags in (["--dtype", "float32"], ["--revision", "v2"]):
        assert main(["download", "org/tiny", *flags]) == 2


def test_broken_connection_resumes_within_the_file(hub, exported, monkeypatch):
    one, _, model = exported
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.add("org/tiny", one)
    hub.broken["model.safetensors"] = 1
    assert main(["download", "org/tiny"]) == 0
    ranges = [asked for method, file, asked in hub.asked if (method, file) == ("GET", "model.safetensors")]
    assert ranges[0] is None and len(ranges) == 2
    half = len(one["model.safetensors"]) // 2
    assert half - 4096 < int(re.fullmatch(r"bytes=(\d+)-", ranges[1])[1]) <= half
    assert same_weights(Path("checkpoints/org/tiny"), model)


def test_interrupted_download_fetches_missing_files(hub, exported, capsys):
    _, many, model = exported
    hub.add("org/tiny", many)
    shards = sorted(name for name in many if name.endswith(".safetensors"))
    assert len(shards) > 2
    hub.failing.add(shards[-1])
    error = refusal(capsys, "org/tiny")
    assert "status 500" in error and "remain in checkpoints/org/.download-tiny; run the same command again" in error
    assert not Path("checkpoints/org/tiny").exists()
    had = {name for name in shards if list(Path("checkpoints/org/.download-tiny").rglob(name))}
    assert had
    hub.failing.clear()
    hub.asked.clear()
    assert main(["download", "org/tiny"]) == 0
    assert {*shards} - had <= {*hub.fetched()} and not had & {*hub.fetched()}
    assert same_weights(find_checkpoint_dir("org/tiny"), model) and os.listdir("checkpoints/org") == ["tiny"]


def test_s7_bytes_that_differ_from_the_hubs_checksum_are_fetched_again(hub, exported, capsys):
    hub.add("org/tiny", files := exported[0])
    for name in (names := ("config.json", "model.safetensors")):
        whole, middle = files[name], len(files[name]) // 2
        hub.damaged[name] = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        assert f"{name} differs from the hub's checksum" in refusal(capsys, "org/tiny")
        del hub.damaged[name]
    assert main(["download", "org/tiny", "--convert", "false"]) == 0
    folder = Path("checkpoints/org/tiny")
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    assert all((folder / name).read_bytes() == files[name] for name in names)


def test_files_of_another_revision_are_not_mixed(hub, exported, capsys, monkeypatch):
    one, many, _ = exported
    hub.add("org/tiny", one | {"tokenizer_old.json": b"{}"})
    hub.failing.add("model.safetensors")
    refusal(capsys, "org/tiny")
    changed = base()
    changed.lm_head.weight.data.zero_()
    write_base(Path("changed"), changed)
    monkeypatch.setattr(export_module, "MAX_SHARD_BYTES", 60_000)
    export_hf("changed", "changed_hf")
    hub.add("org/tiny", contents(Path("changed_hf")))
    assert main(["download", "org/tiny"]) == 0
    assert same_weights(find_checkpoint_dir("org/tiny"), changed)
    assert not list(Path("checkpoints").rglob("tokenizer*"))


def changed_config(files, **values) -> dict[str, bytes]:
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | values).encode()}


def with_index(files, file: str) -> dict[str, bytes]:
    return files | {INDEX: json.dumps({"weight_map": {"lm_head.weight": file}}).encode()}


CASES = {
    "pickle": (
        lambda one, many: {"config.json": one["config.json"], "pytorch_model.bin": b"x"},
        "repo_id org/tiny: holds pytorch_model.bin, a format.*--revision.*toolkit convert_from_hf",
    ),
    "adapter": (
        lambda one, many: {"config.json": one["config.json"], "adapter_model.safetensors": b"x"},
        "holds an adapter, not a complete model",
    ),
    "no weights": (lambda one, many: {"config.json": one["config.json"]}, "holds neither model.safetensors nor"),
    "no config": (lambda one, many: {"model.safetensors": b"x"}, "repo_id org/tiny: holds no config.json"),
    "architecture": (
        lambda one, many: changed_config(one, model_type="rwkv"),
        "repo_id org/tiny: config.json: model_type 'rwkv' is not supported",
    ),
    "quantized": (
        lambda one, many: changed_config(one, quantization_config={"bits": 4}),
        "repo_id org/tiny: config.json: quantization_config",
    ),
    "shard": (lambda one, many: {n: b for n, b in many.items() if "00002-of" not in n}, "00002-of.*is not in the repo"),
    "outside": (lambda one, many: with_index(many, "../a.safetensors"), "points to '../a.safetensors', which is no"),
    "pickled shard": (lambda one, many: with_index(many, "a.bin"), "points to 'a.bin', which is no"),
    "index": (lambda one, many: many | {INDEX: b'{"weight_map": []}'}, "holds no weight_map"),
}


@pytest.mark.parametrize("name", CASES)
def test_unsupported_model_is_rejected_before_weights_are_fetched(hub, exported, capsys, name):
    make, message = CASES[name]
    hub.add("org/tiny", make(*exported[:2]))
    error = refusal(capsys, "org/tiny")
    assert re.search(message, error), error
    assert {*hub.fetched()} <= {"config.json", INDEX} and not Path("checkpoints").exists()


def test_names_revisions_and_access(hub, exported, capsys):
    hub.add("org/gated", exported[0])
    hub.gated.add("org/gated")
    for command, message in [
        (("org/none",), f"repo_id org/none: no such model at {hub.url}, or a private one; check the name, or log in"),
        (("a/b/c",), "repo_id a/b/c: not a valid hub name"),
        (("../etc",), "repo_id ../etc: not a valid hub name"),
        (("org/gated", "--revision", "v9"), "--revision v9: no such branch, tag or commit of org/gated"),
        (("org/gated",), f"is gated; accept its license at {hub.url}/org/gated, then log in with `hf auth login`"),
    ]:
        assert message in refusal(capsys, *command)
    assert not Path("checkpoints").exists()


def test_no_network(hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:password@127.0.0.1:9")
    error = refusal(capsys, "org/tiny")
    assert "no download from http://127.0.0.1:9 (" in error and "HF_ENDPOINT" in error and "password" not in error
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    assert "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set" in refusal(capsys, "org/tiny")


def test_too_small_a_disk(hub, exported, capsys, monkeypatch):
    one = exported[0]
    hub.add("org/tiny", one)
    weights = len(one["model.safetensors"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": weights * 2}))
    error = refusal(capsys, "org/tiny")
    assert "--out_dir checkpoints/org/tiny: downloading and converting org/tiny needs" in error
    assert f"but only {weights * 2:,} are free" in error
    assert hub.fetched() == ["config.json"] and not Path("checkpoints").exists()
    assert main(["download", "org/tiny", "--convert", "false"]) == 0


def test_mxfp4_needs_disk_space_for_16_bits(hub, exported, capsys, monkeypatch):
    hub.add("org/tiny", changed_config(exported[0], quantization_config={"quant_method": "mxfp4"}))
    weights = len(exported[0]["model.safetensors"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": weights * 4}))
    assert "converting org/tiny needs" in refusal(capsys, "org/tiny")


def test_s1_disk_full_during_download(hub, exported, capsys, monkeypatch):
    hub.add("org/tiny", exported[0])
    real = huggingface_hub.snapshot_download

    def fill(*args, local_dir, **options):
        if ".download-" in str(local_dir):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, local_dir=local_dir, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    assert "repo_id org/tiny: No space left on device; free some space" in refusal(capsys, "org/tiny")
    assert not Path("checkpoints/org/tiny").exists()


def test_failed_conversion_keeps_the_download(hub, exported, capsys):
    one = exported[0]
    hub.add("org/tiny", one | {"model.safetensors": one["model.safetensors"][:-100]})
    error = refusal(capsys, "org/tiny")
    assert "model.safetensors" in error and "; the downloaded files remain in checkpoints/org/.download-tiny" in error
    assert os.listdir("checkpoints/org") == [".download-tiny"]
