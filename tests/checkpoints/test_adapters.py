import dataclasses
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from helpers.cases import slow_except
from helpers.saving import save_sharded, write_checkpoint
from safetensors.torch import load_file

from tests.models.test_lora import ALL, LLAMA, NO_HEAD, adapted, base, tokens
from toolkit.checkpoints import fingerprint as fingerprint_module
from toolkit.checkpoints.adapters import (
    ADAPTER_CONFIG,
    ADAPTERS,
    AdapterInfo,
    has_adapters_only,
    is_adapter_dir,
    load_adapters,
    read_adapter,
    write_adapter_files,
)
from toolkit.checkpoints.fingerprint import base_fingerprint
from toolkit.checkpoints.folder import load_compatible_weights, load_model, read_model_config, write_model_files
from toolkit.checkpoints.hf.export_hf import export_hf
from toolkit.checkpoints.merge import MergedWeights, merge_in_place
from toolkit.checkpoints.store import COMPLETE
from toolkit.checkpoints.weights import load_weights
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.errors import UserError
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT
from toolkit.models.lora import is_adapter
from toolkit.models.lora_config import SCORE, LoRAConfig


def write_base(folder: Path, model: GPT) -> Path:
    def write(tmp: Path) -> None:
        write_model_files(tmp, state_dict=model.state_dict(), config=model.config, hyperparameters=None, tokenizer=None)

    write_checkpoint(folder, write)
    return folder


def write_adapted(folder: Path, base_dir: Path, model: GPT, lora: LoRAConfig, **info) -> Path:
    """As a run writes it."""
    weights = {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}

    def write(tmp: Path) -> None:
        files = {"state_dict": None, "hyperparameters": {"lora_r": lora.r}, "tokenizer": train_bpe(["a text"], 270)}
        write_model_files(tmp, config=model.config, **files)
        (tmp / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
        write_adapter_files(tmp, weights, AdapterInfo(lora, base_dir, base_fingerprint(base_dir), **info))

    write_checkpoint(folder, write)
    return folder


def make(tmp_path: Path, config: ModelConfig = LLAMA, dtype: torch.dtype = torch.float32, **options):
    """A base, and adapters that change it: (folder of the base, folder of the adapters, the model)."""
    lora = LoRAConfig(**{**NO_HEAD, "r": 4, "alpha": 6, **options})
    model = adapted(config, dtype, **lora.to_dict())
    base_dir = write_base(tmp_path / "base", base(config, dtype))
    return base_dir, write_adapted(tmp_path / "run" / "final", base_dir, model, lora), model.eval()


@pytest.fixture
def made(tmp_path):
    return make(tmp_path)


def test_adapter_folder_loads_with_its_base(made):
    base_dir, folder, model = made
    assert is_adapter_dir(folder) and has_adapters_only(folder) and not is_adapter_dir(base_dir)
    assert sorted(torch.load(folder / ADAPTERS, weights_only=True)) == sorted(filter(is_adapter, model.state_dict()))
    loaded = load_model(folder)
    assert torch.equal(loaded(tokens()), model(tokens()))
    assert [n for n, p in loaded.named_parameters() if p.requires_grad] == [
        *filter(is_adapter, dict(loaded.named_parameters()))
    ]
    half = load_model(folder, dtype=torch.bfloat16)
    assert {p.dtype for n, p in half.named_parameters() if is_adapter(n)} == {torch.float32}
    assert {p.dtype for n, p in half.named_parameters() if not is_adapter(n)} == {torch.bfloat16}


def test_base_weights_stay_memory_mapped(made):
    """M3: what is loaded is the mapped file, which all processes share."""
    loaded = load_model(made[1])
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc")
    address = loaded.transformer.wte.weight.data_ptr()
    for line in maps.read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith("lit_model.pth")
            return
    raise AssertionError("the address is in no mapping")


@pytest.mark.parametrize("tied", slow_except([True], [False, True]))
@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}, ALL], ids=["lora", "rslora", "dora", "head"])
def test_merged_equals_unmerged(tmp_path, options, tied):
    base_dir, folder, model = make(tmp_path, dataclasses.replace(LLAMA, tie_embeddings=tied), **options)
    before = base_fingerprint(base_dir)
    assert main(["merge_lora", str(folder), "--out_dir", str(tmp_path / "out")]) == 0
    assert main(["merge_lora", str(folder)]) == 0
    untied = tied and options is ALL
    for merged in (folder, tmp_path / "out"):
        loaded = load_model(merged)
        assert not any(map(is_adapter, loaded.state_dict()))
        assert loaded.config.tie_embeddings == (tied and not untied)
        assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == (tied and not untied)
        torch.testing.assert_close(loaded(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)
    names = {p.name for p in (tmp_path / "out").iterdir()}
    expected = {
        "lit_model.pth",
        "model_config.yaml",
        "hyperparameters.yaml",
        "tokenizer.json",
        "generation_config.json",
    }
    assert expected < names and ADAPTERS not in names
    assert base_fingerprint(base_dir) == before and (folder / COMPLETE).exists()
    export_hf(tmp_path / "out", tmp_path / "hf")


def test_merging_in_bf16_rounds_once(tmp_path):
    _, folder, model = make(tmp_path, dtype=torch.bfloat16)
    merged = MergedWeights(folder)
    base_weights = load_weights(tmp_path / "base")
    name = "transformer.h.0.mlp.proj"
    adapter = model.get_submodule(name).lora.whole
    exact = base_weights[f"{name}.weight"].double() + 6 / 4 * adapter.B.double() @ adapter.A.double()
    native = merged[f"{name}.weight"]
    assert native.dtype == torch.bfloat16
    assert (native == exact.to(torch.bfloat16)).float().mean() > 0.999
    assert merged["transformer.wte.weight"] is merged._weights["transformer.wte.weight"]
    # DESIGN section 7: our error against fp32 is at most 1.5 times plain bf16 weights' error
    exact_model = adapted(**{**NO_HEAD, "r": 4, "alpha": 6})
    for n, p in model.named_parameters():
        exact_model.get_parameter(n).data.copy_(p)
    expected = exact_model(tokens())
    merge_in_place(folder)
    errors = [(m(tokens()).float() - expected).norm() for m in (load_model(folder), model)]
    assert errors[0] <= 1.5 * errors[1]


def test_head_is_kept_in_fp32(tmp_path):
    config = dataclasses.replace(
        LLAMA, head="classification", labels=["a", "b"], problem_type="single_label_classification"
    )
    lora = LoRAConfig(**{**NO_HEAD, "r": 4, "alpha": 6})
    model = adapted(config, torch.bfloat16, **lora.to_dict())
    trained = torch.randn(model.score.lora.weight.shape)
    model.score.lora.weight = torch.nn.Parameter(trained)
    base_dir = write_base(tmp_path / "base", base(LLAMA, torch.bfloat16))
    folder = write_adapted(tmp_path / "run", base_dir, model, lora)
    assert MergedWeights(folder)[SCORE].dtype == torch.bfloat16
    for command in ("merge_lora", "convert_to_hf --merge true"):
        name, *words = command.split()
        out_dir = tmp_path / name
        target = [str(out_dir)] if words else ["--out_dir", str(out_dir)]
        assert main([name, str(folder), *target, "--dtype", "float32", *words]) == 0
    assert torch.equal(load_weights(tmp_path / "merge_lora")[SCORE], trained)
    assert torch.equal(load_file(tmp_path / "convert_to_hf" / "model.safetensors")[SCORE], trained)


def test_merge_reports_rounding_error(tmp_path, capsys):
    _, folder, _ = make(tmp_path, dtype=torch.bfloat16, dora=True)
    assert main(["merge_lora", str(folder), "--verify", "true"]) == 0
    shown = capsys.readouterr().out
    assert f"base: {tmp_path / 'base'}, fingerprint " in shown
    difference = float(shown.partition("relative to the largest logit: ")[2])
    assert 1e-4 < difference < 0.1  # the rounding of the weights to bf16


def test_merged_weights_take_precedence_and_are_not_overwritten(made, refusal):
    base_dir, folder, _ = made
    merge_in_place(folder)
    shutil.rmtree(base_dir)
    assert not has_adapters_only(folder)
    load_model(folder)
    assert "already holds merged weights" in refusal("merge_lora", folder)


def test_failed_merge_leaves_adapters_unchanged(tmp_path, monkeypatch):
    config = dataclasses.replace(LLAMA, tie_embeddings=True)
    _, folder, model = make(tmp_path, config, **ALL)
    files = {p.name for p in folder.iterdir()}

    def breaks(weights, path):
        path.write_bytes(b"half a file")
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("toolkit.checkpoints.finite.save_weights", breaks)
    with pytest.raises(UserError, match="No space left on device"):
        merge_in_place(folder)
    assert {p.name for p in folder.iterdir()} == files
    torch.testing.assert_close(load_model(folder)(tokens()), model(tokens()))  # its configuration is untied already
    with pytest.raises(UserError, match="run toolkit merge_lora"):
        load_compatible_weights(folder, model)
    monkeypatch.undo()
    merge_in_place(folder)
    assert {p.name for p in folder.iterdir()} == files | {"lit_model.pth"}
    torch.testing.assert_close(load_model(folder)(tokens()), model(tokens()), rtol=1e-5, atol=1e-5)


def test_base_checkpoint_dir_overrides_recorded_path(made, tmp_path, monkeypatch):
    base_dir, folder, model = made
    moved = base_dir.rename(tmp_path / "elsewhere")
    with pytest.raises(
        UserError, match="base model .*base does not exist; set its location with --base_checkpoint_dir"
    ):
        load_model(folder)
    assert torch.equal(load_model(folder, base_checkpoint_dir=moved)(tokens()), model(tokens()))
    (tmp_path / "checkpoints").mkdir()
    moved.rename(tmp_path / "checkpoints" / "mine")
    monkeypatch.chdir(tmp_path)
    assert read_adapter(folder, "mine").base == Path("checkpoints/mine")
    with pytest.raises(UserError, match="--base_checkpoint_dir none: no such folder"):
        load_model(folder, base_checkpoint_dir="none")


def test_adapters_of_another_base_are_rejected(made, tmp_path, refusal):
    base_dir, folder, _ = made
    other = base()
    other.transformer.wte.weight.data[3, 4] += 1
    other_dir = write_base(tmp_path / "other", other)
    assert "these adapters were not trained on" in refusal("merge_lora", folder, "--base_checkpoint_dir", other_dir)
    shutil.rmtree(base_dir)
    shutil.copytree(other_dir, base_dir)  # the same folder, other weights
    with pytest.raises(UserError, match="these adapters were not trained on"):
        load_model(folder)


def test_fingerprint_depends_on_weights_only(tmp_path, monkeypatch):
    first = base_fingerprint(write_base(tmp_path / "a", base()))
    again = write_base(tmp_path / "b", base())
    (again / "model_config.yaml").write_text("other: 1")
    assert base_fingerprint(again) == first
    torch.save({"model": base().state_dict(), "step": 3}, again / "lit_model.pth")  # LitGPT's way
    assert base_fingerprint(again) == first
    half = base_fingerprint(write_base(tmp_path / "c", base(dtype=torch.bfloat16)))
    renamed = {n.replace("norm_1", "norm_x"): p for n, p in base().state_dict().items()}
    torch.save(renamed, again / "lit_model.pth")
    assert len({first, half, base_fingerprint(again)}) == 3
    read: list[int] = []
    real = fingerprint_module.open_regular

    def counting(*args):
        file = real(*args)
        inner = file.read
        file_read = lambda n=-1: read.append(n) or inner(n)  # noqa: E731
        return type("Counting", (), {**{k: getattr(file, k) for k in ("seek", "tell", "seekable", "close")},
                                     "read": staticmethod(file_read), "__enter__": lambda s: s,
                                     "__exit__": lambda s, *a: file.close()})()  # fmt: skip

    monkeypatch.setattr(fingerprint_module, "open_regular", counting)
    assert base_fingerprint(tmp_path / "a") == first
    assert read and max(read) < (tmp_path / "a" / "lit_model.pth").stat().st_size / 4


def test_sharded_base_has_a_fingerprint(tmp_path):
    prints = []
    for i, change in enumerate((0, 0, 1)):
        model, folder = base(), tmp_path / str(i)
        model.lm_head.weight.data[0, 0] += change
        folder.mkdir()
        save_sharded(model.state_dict(), folder / "lit_model.pth")
        prints.append(base_fingerprint(folder))
    assert prints[0] == prints[1] != prints[2]


def test_mismatched_adapters_are_named(made):
    _, folder, model = made
    adapters = torch.load(folder / ADAPTERS, weights_only=True)
    a = "transformer.h.0.mlp.proj.lora.whole.A"

    def refused(change: dict, *without: str) -> str:
        torch.save({n: t for n, t in {**adapters, **change}.items() if n not in without}, folder / ADAPTERS)
        with pytest.raises(UserError) as error:
            load_model(folder)
        return str(error.value)

    assert f"missing {a} (4, 128)" in refused({}, a)
    assert f"{a} is (5, 128), not (4, 128)" in refused({a: torch.zeros(5, 128)})
    assert "unknown transformer.h.9.lora.A (1)" in refused({"transformer.h.9.lora.A": torch.zeros(1)})
    assert "must hold adapters only" in refused({a: 3})
    torch.save({a: print}, folder / ADAPTERS)
    with pytest.raises(UserError, match="refused: it holds"):
        load_adapters(folder, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora": {"r": 0}}, "--lora_r 0"),
        ({"lora": {"r": 4, "lora_moe": True}}, "unknown lora_moe"),
        ({"lora": None}, "does not describe adapters"),
        ({"base_absolute_path": None}, "does not describe adapters"),
    ],
)
def test_malformed_adapter_yaml_is_a_one_line_error(made, change, message):
    folder = made[1]
    path = folder / ADAPTER_CONFIG
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(UserError, match=message) as error:
        read_adapter(folder)
    assert "\n" not in str(error.value) and ADAPTER_CONFIG in str(error.value)
    path.unlink()
    with pytest.raises(UserError, match="adapter.yaml: no such file"):
        read_adapter(folder)


def test_merge_requires_adapters(made, tmp_path, refusal):
    assert "holds no lit_model.pth.lora" in refusal("merge_lora", made[0])
    assert "already exists and is not empty" in refusal("merge_lora", made[1], "--out_dir", tmp_path)


def test_merged_weights_are_computed_one_at_a_time(made, monkeypatch):
    """M2: nothing is merged before it is asked for, and the base's other weights stay views of its file."""
    merged = MergedWeights(made[1])
    weights = load_compatible_weights(made[0], base())
    assert list(merged) == list(weights) and len(merged) == len(weights)
    names = [name for name in merged if name in merged._layers]
    assert len(names) == LLAMA.n_layer * 5
    assert read_model_config(made[1]) == merged.config
