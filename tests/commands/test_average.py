"""`toolkit average`: the mean of checkpoints of one model."""

import shutil
from dataclasses import replace

import numpy as np
import torch
from helpers.sealing import seal
from helpers.small_runs import text_data

from tests.commands.test_consolidate import CONFIG, make_checkpoint, shard
from toolkit.checkpoints.folder import write_model_config
from toolkit.checkpoints.weights import load_weights, save_weights
from toolkit.cli import main


def test_average_equals_numpy_mean_and_evaluates(corpus, tmp_path, capsys):
    folders = [make_checkpoint(tmp_path / f"step-{n}", steps=n) for n in (1, 5, 9)]
    folders[1] = shard(folders[1], tmp_path / "sharded")
    out = tmp_path / "mean"
    assert main(["average", str(out), "--checkpoint_dirs", ",".join(map(str, folders))]) == 0
    assert "mean of 3 checkpoints" in capsys.readouterr().out and (out / "COMPLETE").exists()
    assert not (out / "trainer").exists() and (out / "tokenizer.json").exists()
    weights, sources = load_weights(out), [load_weights(folder) for folder in folders]
    for name, tensor in weights.items():
        mean = np.mean([source[name].double().numpy() for source in sources], axis=0)
        assert np.array_equal(tensor.numpy(), mean.astype(np.float32)), name
    assert not torch.equal(weights["lm_head.weight"], sources[0]["lm_head.weight"])
    assert weights["lm_head.weight"].data_ptr() == weights["transformer.wte.weight"].data_ptr()
    assert main(["verify", str(out)]) == 0
    assert main(["evaluate", str(out), *text_data(corpus), "--accelerator", "cpu"]) == 0


def test_what_cannot_be_averaged_is_one_line(tmp_path, refusal):
    first = make_checkpoint(tmp_path / "first")
    other, half, tokens, int4, int8 = (tmp_path / name for name in ("other", "half", "tokens", "int4", "int8"))
    for folder in (other, half, tokens, int4, int8):
        shutil.copytree(first, folder)
    write_model_config(replace(CONFIG, norm_eps=1e-3), other / "model_config.yaml")
    for folder, group_size in ((int4, 32), (int8, 16)):
        qat = {"weights": folder.name, "group_size": group_size, "dtype": "float32"}
        write_model_config(replace(CONFIG, qat=qat), folder / "model_config.yaml")
    weights = {name: tensor.bfloat16() for name, tensor in load_weights(first).items()}
    save_weights(weights, half / "lit_model.pth")
    (tokens / "tokenizer.json").write_text("{}")
    for folder in (other, half, tokens, int4, int8):
        seal(folder)
    formats = [
        f"--qat.weights {kind} --qat.group_size {size} in float32" for kind, size in (("int8", 16), ("int4", 32))
    ]
    for out, sources, message in [
        ("new", [first], "--checkpoint_dirs"),
        ("first", [first, first], "already exists and is not empty"),
        ("new", [first, other], "norm_eps is 0.001"),
        ("new", [int4, int8], f"was trained with {formats[0]}, but {int4} with {formats[1]}; give"),
        ("new", [first, int8], f"was trained with {formats[0]}, but {first} without --qat.weights; give"),
        ("new", [first, half], "torch.bfloat16, but torch.float32"),
        ("new", [first, tokens], "tokenizer.json differs"),
        ("new", [first, tmp_path / "none"], "no such folder"),
    ]:
        assert message in refusal("average", tmp_path / out, "--checkpoint_dirs", ",".join(map(str, sources)))
        assert not (tmp_path / "new").exists()
