"""S4: files of weights that are hostile, damaged or not weights; and round trips."""

import os
import pickle
import zipfile

import pytest
import torch
from helpers.damage import RunsCode

from toolkit.checkpoints.weights import load_state, load_weights, save_state, save_weights
from toolkit.distributed.names import canonical_name
from toolkit.errors import UserError


def code_in_a_zip(path, witness):
    torch.save({"a": torch.ones(2), "b": RunsCode(witness)}, path)


def code_beside_a_model(path, witness):
    torch.save({"model": {"a": torch.ones(2)}, "hook": RunsCode(witness)}, path)


def code_in_a_pickle(path, witness):
    path.write_bytes(pickle.dumps(RunsCode(witness)))


def code_in_the_legacy_format(path, witness):
    torch.save({"a": RunsCode(witness)}, path, _use_new_zipfile_serialization=False)


def pickled_module(path, witness):
    torch.save(torch.nn.Linear(2, 2), path)


def torchscript(path, witness):
    torch.jit.script(torch.nn.Linear(2, 2)).save(path)


def empty(path, witness):
    path.touch()


def text(path, witness):
    path.write_text("<html>not found</html>")


def empty_zip(path, witness):
    zipfile.ZipFile(path, "w").close()


def zip_of_something_else(path, witness):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/readme.txt", "hello")


def cut_short(path, witness):
    save_state({"a": torch.randn(5000)}, path)
    os.truncate(path, path.stat().st_size // 2)


def last_byte_missing(path, witness):
    save_state({"a": torch.randn(5000)}, path)
    os.truncate(path, path.stat().st_size - 1)


def no_dictionary(path, witness):
    torch.save([torch.ones(2)], path)


def not_only_tensors(path, witness):
    torch.save({"a": torch.ones(2), "step": 3}, path)


def sparse(path, witness):
    torch.save({"a": torch.eye(3).to_sparse()}, path)


def without_values(path, witness):
    torch.save({"a": torch.empty(3, device="meta")}, path)


def folder(path, witness):
    path.mkdir()


def missing(path, witness):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (code_in_a_zip, "refused: it holds posix.system, which could run code"),
        (code_beside_a_model, "refused: it holds posix.system, which could run code"),
        (code_in_a_pickle, "not written by torch.save"),
        (code_in_the_legacy_format, "not written by torch.save"),
        (pickled_module, "refused: it holds torch.nn.modules.linear.Linear, which could run code"),
        (torchscript, "refused: it holds a TorchScript program"),
        (empty, "the file is damaged or truncated"),
        (text, "not written by torch.save"),
        (empty_zip, "not written by torch.save"),
        (zip_of_something_else, "damaged or truncated"),
        (cut_short, "damaged or truncated"),
        (last_byte_missing, "damaged or truncated"),
        (no_dictionary, "holds a list, not a dictionary"),
        (not_only_tensors, "'step' is not a plain tensor"),
        (sparse, "'a' is not a plain tensor"),
        (without_values, "'a' is not a plain tensor"),
        (folder, "holds no .metadata"),
        (missing, "No such file"),
    ],
)
def test_s4_bad_weight_files_are_one_line_errors_and_run_no_code(tmp_path, recwarn, make, message):
    path, witness = tmp_path / "lit_model.pth", tmp_path / "it ran".replace(" ", "-")
    make(path, witness)
    made = len(recwarn)
    with pytest.raises(UserError) as error:
        load_weights(tmp_path)
    assert str(error.value).startswith(f"{path}: ") and message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 300
    assert not witness.exists()
    assert len(recwarn) == made, "nothing but the one line"


def test_s4_payload_runs_when_unpickled(tmp_path):
    code_in_a_zip(tmp_path / "x", tmp_path / "witness")
    torch.load(tmp_path / "x", weights_only=False)
    assert (tmp_path / "witness").exists()


def test_s4_trainer_state_is_read_as_safely(tmp_path):
    code_in_a_zip(tmp_path / "state.pth", tmp_path / "witness")
    with pytest.raises(UserError, match="could run code"):
        load_state(tmp_path / "state.pth")
    assert not (tmp_path / "witness").exists()


def test_trainer_state_holds_plain_tensors_only(tmp_path):
    for tensor in (torch.eye(3).to_sparse(), torch.empty(3, device="meta")):
        torch.save({"optimizer": {"groups": [{"w": tensor}]}}, tmp_path / "state.pth")
        with pytest.raises(UserError, match="'optimizer groups 0 w' is not a plain tensor"):
            load_state(tmp_path / "state.pth")
    endless = {}
    endless["a"] = endless
    torch.save(endless, tmp_path / "state.pth")
    with pytest.raises(UserError, match="damaged"):
        load_state(tmp_path / "state.pth")


def test_round_trip_of_trainer_state(tmp_path):
    state = {"optimizer": {"state": {"w": {"step": torch.tensor(3.0)}}, "lr": [1e-3]}, "rng": torch.get_rng_state()}
    save_state(state, tmp_path / "state.pth")
    back = load_state(tmp_path / "state.pth")
    assert back["optimizer"]["lr"] == [1e-3] and back["optimizer"]["state"]["w"]["step"] == 3
    assert torch.equal(back["rng"], state["rng"])


@pytest.mark.parametrize("wrap", [lambda weights: weights, lambda weights: {"model": weights, "step_count": 5}])
def test_weights_are_read_from_the_top_or_below_model(tmp_path, wrap):
    torch.save(wrap({"_forward_module.lm_head.weight": torch.arange(4.0)}), tmp_path / "lit_model.pth")
    assert load_weights(tmp_path)["lm_head.weight"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.qkv.weight",
        "_orig_mod.transformer.h.0.attn.qkv.weight",
        "_forward_module.module.transformer.h.0._orig_mod.attn.qkv.weight",
        "module._fsdp_wrapped_module.transformer.h.0._fsdp_wrapped_module._checkpoint_wrapped_module.attn.qkv.weight",
    ],
)
def test_names_on_disk_have_no_wrapper_prefixes(tmp_path, name):
    assert canonical_name(name) == "transformer.h.0.attn.qkv.weight"
    save_weights({name: torch.ones(2)}, tmp_path / "lit_model.pth")
    assert list(torch.load(tmp_path / "lit_model.pth", weights_only=True)) == ["transformer.h.0.attn.qkv.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_n10_tied_weights_are_one_tensor_in_the_file(tmp_path, dtype):
    shared = torch.nn.Parameter(torch.randn(1000, 10, dtype=dtype))
    save_weights({"wte": shared, "lm_head": shared, "bias": torch.ones(2)}, tmp_path / "lit_model.pth")
    assert (tmp_path / "lit_model.pth").stat().st_size < 1.2 * shared.nbytes + 2000
    back = load_weights(tmp_path)
    assert back["wte"].data_ptr() == back["lm_head"].data_ptr()
    assert torch.equal(back["wte"], shared) and type(back["wte"]) is torch.Tensor


def test_views_are_saved_without_their_storage(tmp_path):
    flat = torch.randn(100_000)
    piece = flat[10:110].view(10, 10)
    save_weights({"a": piece, "b": flat[10:110].view(10, 10), "c": piece.t()}, tmp_path / "lit_model.pth")
    assert (tmp_path / "lit_model.pth").stat().st_size < 5000
    back = load_weights(tmp_path)
    assert torch.equal(back["a"], piece) and torch.equal(back["c"], piece.t())
    assert back["a"].data_ptr() == back["b"].data_ptr()
