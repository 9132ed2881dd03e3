"""`toolkit consolidate`: shards become single files, and what other commands make of shards."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.peak_memory import with_path
from helpers.saving import save_sharded
from helpers.sealing import seal
from helpers.small_runs import text_data

from toolkit.checkpoints.folder import load_model, write_model_files
from toolkit.checkpoints.weights import load_state, load_weights, save_state
from toolkit.cli import main
from toolkit.data.tokenizer import train_bpe
from toolkit.models.config import ModelConfig
from toolkit.models.gpt import GPT

CONFIG = ModelConfig(name="small", vocab_size=280, block_size=32, n_layer=2, n_embd=32, n_head=2, tie_embeddings=True)


def make_checkpoint(folder, config=CONFIG, steps=1):
    """A checkpoint of single files, as one process writes it."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for _ in range(steps):
        optimizer.step()
    folder.mkdir()
    tokenizer = train_bpe(["a text"], 270)
    write_model_files(
        folder, state_dict=model.state_dict(), config=config, hyperparameters={"seed": 1}, tokenizer=tokenizer
    )
    (folder / "trainer").mkdir()
    (folder / "trainer" / "meta.json").write_text(json.dumps({"step": 1}))
    names = [name for name, _ in model.named_parameters()]
    state = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    groups = [{"params": names, "lr": 1e-3}]
    rng = {"torch": torch.get_rng_state()}
    save_state({"optimizer": {"state": state, "param_groups": groups}, "rng": [rng]}, folder / "trainer" / "state.pth")
    return seal(folder)


def shard(source, folder):
    """The same checkpoint in the other form."""
    shutil.copytree(source, folder)
    (folder / "lit_model.pth").unlink()
    save_sharded(load_weights(source), folder / "lit_model.pth")
    state = load_state(source / "trainer" / "state.pth")
    tensors = state["optimizer"].pop("state")
    flat = {f"{name}|{key}": tensor for name, values in tensors.items() for key, tensor in values.items()}
    save_sharded(flat, folder / "trainer" / "optimizer")
    save_state(state, folder / "trainer" / "state.pth")
    return seal(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("full") / "step-00000001")


@pytest.fixture(scope="module")
def sharded(checkpoint, tmp_path_factory):
    return shard(checkpoint, tmp_path_factory.mktemp("sharded") / "step-00000001")


def files(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_consolidated_equals_unsharded_checkpoint(checkpoint, sharded, tmp_path, capsys):
    other_temp = tmp_path / ".tmp-of-another-process"
    other_temp.mkdir()
    before = files(sharded)
    assert main(["consolidate", str(sharded), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'one'}\n"
    native, reference = files(tmp_path / "one"), files(checkpoint)
    assert native.keys() == reference.keys() and "COMPLETE" in native and "trainer/meta.json" in native
    new = {"lit_model.pth", "trainer/state.pth", "COMPLETE"}
    assert all(native[name] == reference[name] for name in native.keys() - new)
    assert main(["verify", str(tmp_path / "one")]) == 0
    assert len(native["lit_model.pth"]) == len(reference["lit_model.pth"]), "tied weights are stored once"
    a, b = load_weights(tmp_path / "one"), load_weights(checkpoint)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    a, b = (load_state(folder / "trainer" / "state.pth") for folder in (tmp_path / "one", checkpoint))
    assert a.keys() == b.keys() and a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)
    torch.testing.assert_close(a["rng"], b["rng"], rtol=0, atol=0)
    assert files(sharded) == before and other_temp.exists()


def test_run_resumes_from_consolidated_checkpoint(corpus, tmp_path):
    def run(out, steps, *more):
        sizes = ["--train.global_batch_size", "4", "--train.max_seq_length", "32", "--train.save_interval", "2"]
        more = [*more, "--accelerator", "cpu", "--train.max_steps", str(steps), "--train.lr_schedule", "constant"]
        assert (
            main(["pretrain", "pico-llama", *text_data(corpus), *sizes, "--out_dir", str(tmp_path / out), *more]) == 0
        )

    run("straight", 4)
    source = tmp_path / "straight" / "step-00000002"
    assert main(["consolidate", str(shard(source, tmp_path / "sharded")), str(tmp_path / "one")]) == 0
    run("resumed", 4, "--resume", str(tmp_path / "one"))
    a, b = (load_weights(tmp_path / out / "final") for out in ("straight", "resumed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("part", ["lit_model.pth", "trainer/optimizer"])
def test_one_sharded_part_is_enough(checkpoint, sharded, tmp_path, part):
    shutil.copytree(sharded, tmp_path / "mixed")
    if part == "lit_model.pth":
        shutil.rmtree(tmp_path / "mixed" / "trainer")
    else:
        shutil.rmtree(tmp_path / "mixed" / "lit_model.pth")
        shutil.copy(checkpoint / "lit_model.pth", tmp_path / "mixed")
    seal(tmp_path / "mixed")
    assert main(["consolidate", str(tmp_path / "mixed"), str(tmp_path / "one")]) == 0
    expected = {name for name in files(checkpoint) if part != "lit_model.pth" or not name.startswith("trainer")}
    assert files(tmp_path / "one").keys() == expected


def test_bad_input_is_a_one_line_error_and_leaves_no_files(checkpoint, sharded, tmp_path, refusal):
    broken, used = tmp_path / "broken", tmp_path / "used"
    shutil.copytree(sharded, broken)
    shutil.rmtree(broken / "trainer" / "optimizer")
    empty = tmp_path / "empty"
    shutil.copytree(sharded, empty)
    save_state({"rng": []}, empty / "trainer" / "state.pth")
    (empty / "COMPLETE").write_text("")  # without checksums
    used.mkdir()
    (used / "file").touch()
    here = {path.name for path in tmp_path.iterdir()}
    for source, out, message in [
        (checkpoint, tmp_path / "one", f"checkpoint_dir {checkpoint}: is not sharded"),
        (sharded, used, f"out_dir {used}: already exists and is not empty"),
        (sharded, sharded / "one", "is inside the checkpoint"),
        (tmp_path / "none", tmp_path / "one", "no such folder"),
        (broken, tmp_path / "one", f"{broken}/trainer/optimizer: no such folder"),
        (empty, tmp_path / "one", f"{empty}/trainer/state.pth: optimizer: is missing or not a dict"),
    ]:
        assert message in refusal("consolidate", source, out, "--verify_checkpoint", "false")
        assert {path.name for path in tmp_path.iterdir()} == here and not (sharded / "one").exists()


def test_other_commands_read_shards(checkpoint, sharded, tmp_path, capsys):
    outputs = []
    for folder in (checkpoint, sharded):
        assert main(["generate", str(folder), "--prompt", "a t", "--temperature", "0", "--max_new_tokens", "8"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] and len(outputs[0]) > 3
    for folder in (checkpoint, sharded):
        assert main(["convert_to_hf", str(folder), str(tmp_path / folder.parent.name)]) == 0
    whole, shards = (files(tmp_path / folder.parent.name) for folder in (checkpoint, sharded))
    for exported in (whole, shards):
        exported.pop("README.md")  # names the folder
    assert whole == shards
    model = load_model(sharded)
    assert model.lm_head.weight is model.transformer.wte.weight


# Prints by how much the peak of anonymous memory rose, in units of the largest tensor.
PEAK = """
import sys, torch
from pathlib import Path
from helpers.peak_memory import rise
from toolkit.checkpoints.run.consolidate import consolidate

torch.set_num_threads(1)
small, large, largest = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
consolidate(small, small.with_name("small-one"))  # imports and caches are not what is measured
print(rise(consolidate, large, large.with_name("large-one"))[0] / largest)
"""


@pytest.mark.slow
def test_m2_it_holds_a_small_multiple_of_the_largest_tensor(sharded, tmp_path):
    size = {"n_layer": 6, "n_embd": 384, "n_head": 6, "intermediate_size": 1536}
    config = ModelConfig(name="wide", vocab_size=280, block_size=32, **size)
    full = make_checkpoint(tmp_path / "full", config)
    weights = [tensor.nbytes for tensor in load_weights(full).values()]
    assert sum(weights) > 20 * max(weights), "the model must be many times its largest weight"
    small = shutil.copytree(sharded, tmp_path / "small")
    large = shard(full, tmp_path / "large")
    command = [sys.executable, "-c", PEAK, small, large, str(max(weights))]
    measured = subprocess.run(command, capture_output=True, text=True, check=True, env=with_path())
    assert 0 < float(measured.stdout) < 4
