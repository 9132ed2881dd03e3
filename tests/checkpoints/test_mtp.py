"""Weights of multi-token prediction: unchanged from import through every writer of checkpoints to export.

They are links where the file system allows it. Cost of a copy: one decoder layer of the base (14 GB for DeepSeek-V3),
once per disk.
"""

import errno
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.cases import slow_except
from helpers.damage import change_json, flip
from helpers.groups import Case, run_group
from helpers.peak_memory import with_path
from helpers.sealing import seal
from helpers.small_runs import write_base, write_rows
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import toolkit
from tests.checkpoints.hf.test_fp8 import QUANTIZATION
from tests.checkpoints.test_adapters import LLAMA, make
from tests.checkpoints.test_streaming import MEASURE
from tests.commands.test_consolidate import CONFIG as SMALL
from tests.commands.test_consolidate import make_checkpoint, shard
from tests.training.test_run import arguments
from toolkit import Callback
from toolkit.checkpoints.hf import export_hf
from toolkit.checkpoints.hf.import_hf import import_hf
from toolkit.checkpoints.store import MTP, newest_first
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.training.engine import run_training

# By model type: the name in HF_CONFIGS, a layer to copy and its name in the MTP part, and keys of config.json.
TYPES = {
    "deepseek_v3": ("deepseek-v3", "model.layers.1.", "model.layers.2.", {"num_nextn_predict_layers": 1}),
    "glm4_moe": ("glm4-moe", "model.layers.1.", "model.layers.2.", {"num_nextn_predict_layers": 1}),
    "glm4_moe_lite": ("glm4-moe-lite", "model.layers.1.", "model.layers.2.", {"num_nextn_predict_layers": 1}),
    "qwen3_next": ("qwen3-next", "model.layers.1.", "mtp.layers.0.", {}),
    "qwen3_5_text": ("qwen3.5", "model.layers.1.", "mtp.layers.0.", {"mtp_num_hidden_layers": 1}),
    "qwen3_5_moe_text": ("qwen3.5-moe", "model.layers.1.", "mtp.layers.0.", {"mtp_num_hidden_layers": 1}),
    "ernie4_5_moe": ("ernie4.5-moe", "model.layers.1.", "model.mtp_block.0.", {"num_nextn_predict_layers": 1}),
}
RUN = ["--data", "JSON", "--data.prompt_style", "plain", "--accelerator", "cpu", "--train.global_batch_size", "2",
       "--train.micro_batch_size", "2", "--train.learning_rate", "1e-2", "--train.lr_warmup_steps", "0",
       "--eval.final_validation", "false", "--eval.max_new_tokens", "0"]  # fmt: skip
STEPS = ["--train.save_interval", "1", "--train.keep_best", "true", "--data.val_split_fraction", "0.2",
         "--eval.interval", "1", "--eval.max_iters", "1"]  # fmt: skip


@torch.no_grad()
def write_hf(kind: str, folder: Path, tiny_models, corpus: Path) -> dict[str, torch.Tensor]:
    """Write a random model of transformers with an MTP layer, in several dtypes. Return the layer's weights."""
    name, layer, prefix, keys = TYPES[kind]
    shutil.copytree(tiny_models[name].hf, folder)
    train_bpe([file.read_text() for file in sorted(corpus.iterdir())], 300).save(folder)
    trunk = load_file(folder / "model.safetensors")
    mtp = {name.replace(layer, prefix): t.bfloat16() for name, t in trunk.items() if name.startswith(layer)}
    size = trunk["model.norm.weight"].numel()
    mtp |= {f"{prefix}eh_proj.weight": torch.randn(size, 2 * size) / size}
    for i, norm in enumerate(("enorm", "hnorm", "shared_head.norm")):
        mtp[f"{prefix}{norm}.weight"] = torch.full((size,), 1.0 + i / 8)
    save_file(trunk | mtp, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | keys))
    return mtp


def require_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].dtype == tensor.dtype and torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("kind", slow_except(["deepseek_v3"], TYPES))
def test_mtp_weights_go_through_training_to_the_export(
    kind, tiny_models, corpus, tmp_path, capsys, monkeypatch, refusal
):
    transformers = pytest.importorskip("transformers")
    hf, base, run, out = (tmp_path / name for name in ("hf", "base", "run", "out"))
    mtp, trunk = (
        write_hf(kind, hf, tiny_models, corpus),
        load_file(tiny_models[TYPES[kind][0]].hf / "model.safetensors"),
    )
    rows = write_rows(tmp_path)
    assert main(["convert_from_hf", str(hf), str(base), "--dtype", "float32"]) == 0
    assert f"kept {len(mtp)} weights of multi-token prediction" in capsys.readouterr().err
    require_equal(load_file(base / MTP), mtp)
    assert (
        main(
            [
                "finetune_full",
                str(base),
                "--data.json_path",
                str(rows),
                "--out_dir",
                str(run),
                *RUN,
                "--train.max_steps",
                "1",
            ]
        )
        == 0
    )
    assert (run / "final" / MTP).samefile(base / MTP) and f'"{MTP}"' in (run / "final" / "COMPLETE").read_text()
    monkeypatch.setattr(export_hf, "MAX_SHARD_BYTES", 50_000)
    capsys.readouterr()
    assert main(["convert_to_hf", str(run / "final"), str(out), "--dtype", "float16"]) == 0
    assert capsys.readouterr().err.count("multi-token prediction are the base model's, not trained") == 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    exported = {}
    for file in set(index["weight_map"].values()):
        exported |= (shard := load_file(out / file))
        assert all(index["weight_map"][name] == file for name in shard)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in exported.values())
    require_equal({name: exported.pop(name) for name in mtp}, mtp)
    assert exported.keys() == trunk.keys() and any((exported[n].float() - trunk[n]).abs().max() > 1e-3 for n in trunk)
    config = json.loads((out / "config.json").read_text())
    assert TYPES[kind][3].items() <= config.items() and "num_hidden_layers" in config
    loaded = [transformers.AutoModelForCausalLM.from_pretrained(f, output_loading_info=True)[1] for f in (hf, out)]
    assert loaded[0]["unexpected_keys"] == loaded[1]["unexpected_keys"] and not loaded[1]["missing_keys"]
    flip(base / MTP)
    assert f"damaged: {MTP} (checksum mismatch" in refusal("convert_to_hf", run / "final", tmp_path / "again")


MTP_NAME = "model.mtp_block.0.weight"  # in ERNIE 4.5, which otherwise is a Llama


def with_mtp(folder: Path) -> Path:
    """Add a file of MTP weights to a model folder."""
    save_file({MTP_NAME: torch.ones(3, dtype=torch.bfloat16)}, folder / MTP, {"config": '{"mtp_layers": 1}'})
    return seal(folder)


def make_average(tmp_path: Path) -> tuple[Path, Path]:
    a, b = (with_mtp(make_checkpoint(tmp_path / name, replace(SMALL, family="ernie4_5"))) for name in "ab")
    assert main(["average", str(tmp_path / "out"), "--checkpoint_dirs", f"{a},{b}"]) == 0
    return a, tmp_path / "out"


def make_consolidated(tmp_path: Path) -> tuple[Path, Path]:
    source = shard(with_mtp(make_checkpoint(tmp_path / "a", replace(SMALL, family="ernie4_5"))), tmp_path / "shards")
    assert main(["consolidate", str(source), str(tmp_path / "out")]) == 0
    return source, tmp_path / "out"


def make_merged(tmp_path: Path, *out: str) -> tuple[Path, Path]:
    base, folder, _ = make(tmp_path, replace(LLAMA, family="ernie4_5"))
    with_mtp(base)
    assert main(["merge_lora", str(seal(folder)), *out]) == 0
    return base, folder


# How each caller of the functions that write folders gets the file: a function returns a source and what was written.
WRITERS = {
    "checkpoints/average.py": make_average,
    "checkpoints/merge.py": make_merged,
    "checkpoints/run/consolidate.py": make_consolidated,
    "checkpoints/merge.py --out_dir": lambda path: (make_merged(path, "--out_dir", f"{path}/out")[0], path / "out"),
}
ELSEWHERE = {
    "checkpoints/hf/import_hf.py": "above",
    "checkpoints/hf/export_hf.py": "above",
    "training/pending_save.py": "above",
    "interop/toolkit_interop/peft/export_peft.py": "adapters: their base has the file",
    "interop/toolkit_interop/export_litgpt.py": "refuses all families with MTP",
    "interop/toolkit_interop/gguf/export_gguf.py": "refuses all families with MTP",
}


@pytest.mark.parametrize("writer", slow_except(["checkpoints/average.py", "checkpoints/merge.py"], WRITERS))
def test_writers_of_checkpoints_link_mtp_weights(writer, tmp_path):
    source, folder = WRITERS[writer](tmp_path)
    assert (folder / MTP).samefile(source / MTP) and f'"{MTP}"' in (folder / "COMPLETE").read_text()
    assert main(["verify", str(folder)]) == 0
    assert main(["convert_to_hf", str(folder), str(tmp_path / "hf")]) == 0
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.get_tensor(MTP_NAME).dtype == torch.bfloat16
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["mtp_layers"] == 1


def test_all_writers_of_folders_are_listed():
    """A new writer must say what becomes of the file."""
    package = Path(toolkit.__file__).parent
    callers = set()
    for root in (package, package.parent / "extensions"):
        for path in root.rglob("*.py"):
            is_user = re.search("write_model_folder|write_folder|write_file|begin_checkpoint", path.read_text())
            if is_user and "tests" not in path.parts and path.name != "store.py":
                callers.add(path.relative_to(root).as_posix())
    assert callers == {name.partition(" ")[0] for name in WRITERS} | ELSEWHERE.keys()


@pytest.mark.slow
def test_s1_full_disk_and_lost_base_leave_the_last_checkpoint(corpus, tmp_path, monkeypatch, refusal, capsys):
    """Without hard links: each checkpoint has a copy, of the newest one; a copy that fails is one line."""
    (tmp_path / "base").mkdir()
    base, run = with_mtp(write_base(tmp_path / "base", corpus, family="ernie4_5")), tmp_path / "run"
    words = [
        "finetune_full",
        str(base),
        "--data.json_path",
        str(write_rows(tmp_path)),
        "--out_dir",
        str(run),
        *RUN,
        *STEPS,
    ]
    copied: list[Path] = []
    is_full = False
    copy = shutil.copy2

    def copy2(source: Path, target: Path) -> None:
        copied.append(source)
        copy(source, target)
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr("toolkit.io.atomic.os.link", link)
    monkeypatch.setattr("toolkit.io.atomic.shutil.copy2", copy2)
    assert main([*words, "--train.max_steps", "2"]) == 0
    assert copied[0] == base / MTP and all(run in source.parents for source in copied[1:])
    is_full = True
    line = refusal(*words, "--resume", "auto", "--train.max_steps", "3")
    assert "No space left on device" in line and "final" in line
    assert sorted(path.name for path in run.iterdir() if path.is_dir() and path.name != "logs") == [
        "best", "final", "step-00000001"
    ]  # fmt: skip
    assert main(["verify", str(run)]) == 0


# Runs a command without hard links, and kills the process in the middle of a copy for step 2.
KILLED = """
import errno, os, shutil, sys
from toolkit.cli import main

def link(source, target):
    raise OSError(errno.EXDEV, "Invalid cross-device link")

def copy(source, target):
    if "step-00000002" in str(target):
        target.write_bytes(source.read_bytes()[:50])
        os._exit(9)
    shutil.copyfile(source, target)

os.link, shutil.copy2 = link, copy
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_s1_kill_during_the_copy_leaves_the_last_checkpoint(corpus, tmp_path):
    """Without hard links; the next launch removes the rest and goes on."""
    (tmp_path / "base").mkdir()
    base, run = with_mtp(write_base(tmp_path / "base", corpus, family="ernie4_5")), tmp_path / "run"
    words = ["finetune_full", str(base), "--data.json_path", str(write_rows(tmp_path)), "--out_dir", str(run), *RUN]
    words += ["--train.save_interval", "1", "--train.max_steps", "3"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *words], env=with_path(), capture_output=True, text=True)
    assert killed.returncode == 9, killed.stderr
    assert [path.name for path in newest_first(run)] == ["step-00000001"] and len(list(run.glob(".tmp-*"))) == 1
    assert main(["verify", str(run)]) == 0
    assert main([*words, "--resume", "auto"]) == 0
    assert main(["verify", str(run)]) == 0 and not list(run.glob(".tmp-*"))
    require_equal(load_file(run / "final" / MTP), load_file(base / MTP))


@pytest.mark.slow
def test_sharded_remote_and_resumed_runs_keep_mtp_weights(corpus, tmp_path):
    (tmp_path / "base").mkdir()
    base = with_mtp(write_base(tmp_path / "base", corpus, family="ernie4_5"))
    flags = [str(base), "--data.json_path", str(write_rows(tmp_path)), *RUN, "--train.save_interval", "1"]
    flags += ["--train.max_steps", "2"]
    fsdp = ["--strategy", "fsdp", "--train.micro_batch_size", "1", "--fsdp.state_dict_type"]
    cases = [Case(kind, [*flags, *fsdp, kind], command="finetune_full") for kind in ("full", "sharded")]
    run_group(tmp_path, 2, cases, [])
    for folder in [*newest_first(tmp_path / "full"), *newest_first(tmp_path / "sharded")]:
        assert (folder / MTP).samefile(base / MTP), folder
        assert main(["verify", str(folder)]) == 0
    step, remote = tmp_path / "sharded" / "step-00000001", f"file://{tmp_path}/bucket/run"
    assert main(["finetune_full", *flags, "--out_dir", remote, "--resume", str(step)]) == 0
    assert main(["convert_to_hf", f"{remote}/final", str(tmp_path / "hf")]) == 0
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor(MTP_NAME), torch.ones(3, dtype=torch.bfloat16))


@pytest.mark.slow
def test_a_deleted_file_of_the_base_is_a_warning(corpus, tmp_path, capsys):
    """The run goes on: its own weights are worth more."""
    (tmp_path / "base").mkdir()
    base = with_mtp(write_base(tmp_path / "base", corpus, family="ernie4_5"))

    class Delete(Callback):
        def on_step_end(self, trainer, metrics) -> None:
            (base / MTP).unlink(missing_ok=True)

    options = {"model_name": None, "initial_checkpoint_dir": str(base), "train": {"max_steps": 1}}
    run_training(arguments(corpus, tmp_path / "run", **options), [Delete()])
    assert f"warning: {base / MTP} was deleted; copy it back to keep it in checkpoints" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "run")]) == 0 and not (tmp_path / "run" / "final" / MTP).exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_transformers_predicts_several_tokens_with_the_export(kind, tiny_models, corpus, tmp_path, monkeypatch):
    """transformers loads MTP weights by patterns with the number of layers of the published model."""
    transformers = pytest.importorskip("transformers", "5.20")
    write_hf(kind, tmp_path / "hf", tiny_models, corpus)
    import_hf(tmp_path / "hf", tmp_path / "base")
    monkeypatch.setattr(export_hf, "MAX_SHARD_BYTES", 50_000)
    export_hf.export_hf(tmp_path / "base", tmp_path / "out")
    generated = []
    for folder in ("hf", "out"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        for cls in (type(model), *type(model).__bases__):
            monkeypatch.setattr(cls, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"], raising=False)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        generated.append(model.generate(torch.arange(9)[None], use_mtp=True, max_new_tokens=12, do_sample=False))
    assert torch.equal(*generated)


@pytest.mark.slow
def test_models_with_a_score_layer_have_no_mtp_weights(tiny_models, corpus, tmp_path):
    mtp = write_hf("deepseek_v3", tmp_path / "hf", tiny_models, corpus)
    file, config = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "config.json"
    weights = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(weights | {"score.weight": torch.randn(2, weights["model.norm.weight"].numel())}, file)
    change_json(config, architectures=["DeepseekV3ForSequenceClassification"], num_labels=2)
    notes = import_hf(tmp_path / "hf", tmp_path / "scored")
    assert f"dropped {len(mtp)} weights that the text model does not use: layers ({len(mtp)})" in notes
    assert not (tmp_path / "scored" / MTP).exists()


@pytest.mark.slow
def test_m2_one_mtp_weight_is_in_memory_at_a_time(tiny_models, corpus, tmp_path):
    """12 weights of 50 MB, one of them in 8 bits with scales, which become bf16, as the trunk's do."""
    write_hf("deepseek_v3", tmp_path / "hf", tiny_models, corpus)
    scales = torch.rand(40, 20)
    names = [f"model.layers.2.mlp.experts.{i}.weight" for i in range(12)]
    large = {name: torch.full((5000, 5000), 1.0, dtype=torch.bfloat16) for name in names[1:]}
    large |= {names[0]: torch.ones(5000, 2500).to(torch.float8_e4m3fn), f"{names[0]}_scale_inv": scales}
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | large, file)
    change_json(tmp_path / "hf" / "config.json", quantization_config={**QUANTIZATION, "weight_block_size": [125, 125]})
    command = [sys.executable, "-c", MEASURE, tmp_path]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    rises = [float(line.split()[0]) for line in measured.stdout.splitlines() if line[:1].isdigit()]
    assert len(rises) == 2 and max(rises) < 0.2, rises  # GB
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(exported[name], large[name]) for name in names[1:])
    expected = scales.repeat_interleave(125, 0).repeat_interleave(125, 1).bfloat16()
    assert torch.equal(exported[names[0]], expected) and f"{names[0]}_scale_inv" not in exported
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.slow
def test_mtp_weights_of_multimodal_models_are_kept_and_images_dropped(tiny_models, corpus, tmp_path):
    mtp, file = write_hf("qwen3_5_text", tmp_path / "hf", tiny_models, corpus), tmp_path / "hf" / "model.safetensors"
    trunk = {name.replace("model.", "model.language_model.", 1): t for name, t in load_file(file).items()}
    save_file(trunk | {"model.visual.blocks.0.norm1.weight": torch.ones(3)}, file)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": json.loads(config.read_text())}))
    notes = import_hf(tmp_path / "hf", tmp_path / "base")
    assert "dropped 1 weights that the text model does not use: visual (1)" in notes
    assert f"kept {len(mtp)} weights of multi-token prediction in {MTP}: they are exported, not trained" in notes
    export_hf.export_hf(tmp_path / "base", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    require_equal({name: exported[name] for name in mtp}, mtp)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mtp_num_hidden_layers"] == 1


def test_other_content_of_the_file_is_one_line(tmp_path, refusal):
    folder = with_mtp(make_checkpoint(tmp_path / "a", replace(SMALL, family="ernie4_5")))
    for name, dtype, config, message in [
        ("lm_head.weight", torch.float32, "{}", "'lm_head.weight' (torch.float32) is no such weight of ernie4_5"),
        (MTP_NAME, torch.int64, "{}", "(torch.int64) is no such weight"),
        (MTP_NAME, torch.float32, "[]", "has no attribute"),
    ]:
        save_file({name: torch.ones(3, dtype=dtype)}, folder / MTP, {"config": config})
        seal(folder)
        line = refusal("convert_to_hf", folder, tmp_path / "out")
        assert f"{folder / MTP}: damaged: " in line and message in line
