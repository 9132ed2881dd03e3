"""Folders of shards: saved and loaded by real processes; S4 on hostile and damaged ones; M2."""

import errno
import os
import pickle
import re
import resource
import shutil
import signal
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.damage import RunsCode
from helpers.groups import start_ranks
from helpers.saving import save_sharded
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from toolkit.checkpoints import scratch
from toolkit.checkpoints.run import shard_metadata
from toolkit.checkpoints.run.sharded import check_sharded, is_sharded, load_sharded, read_sharded
from toolkit.checkpoints.store import disk_full_reason
from toolkit.checkpoints.weights import load_weights
from toolkit.errors import UserError

RANKS = 2
_FULL = StateDictOptions(full_state_dict=True)


def unsharded() -> dict[str, torch.Tensor]:
    """Tensors of many kinds, the same in every process."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"even": (8, 3), "uneven": (5, 4), "fewer rows than ranks": (1, 6), "vector": (7,), "none": (0, 3)}
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    tensors["w|exp_avg"] = torch.randn(701, 101, generator=draw).bfloat16()  # large enough for a separate file
    return tensors | {"w|step": torch.tensor(3.0), "flags": torch.tensor([True, False])}


def fsdp(seed: int, mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 6)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def flat(optimizer_state) -> dict[str, torch.Tensor]:
    return {f"{name}|{key}": value for name, state in optimizer_state["state"].items() for key, value in state.items()}


def raised(function, *args) -> BaseException | None:
    try:
        function(*args)
    except BaseException as error:
        return error
    return None


def rank_main(rank: int, folder) -> None:
    """What each rank of the group does; the tests below look at what is left."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FSDP's, of a model on the CPU
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    mesh, found = init_device_mesh("cpu", (RANKS,)), {}
    save_and_load_dtensors(mesh, folder, found)
    save_and_load_fsdp(mesh, folder / "fsdp", found)
    fail(rank, mesh, folder, found)
    torch.save(found, folder / f"found-{rank}.pt")
    dist.destroy_process_group()
    # gloo's threads let go of the last collective's tensors, and need the interpreter for it; one that is ending by
    # then makes them abort (seen in one run of four without this line).
    time.sleep(0.2)


def save_and_load_dtensors(mesh, folder, found) -> None:
    plain = ("w|step", "flags")
    tensors = {k: v if k in plain else distribute_tensor(v, mesh, [Shard(0)]) for k, v in unsharded().items()}
    save_sharded(tensors, folder / "dtensors")
    found["types"] = {type(v) for v in tensors.values()} == {torch.Tensor, DTensor}
    for placement in (Shard(0), Shard(1), Replicate()):
        into = {
            k: torch.zeros_like(v)
            if k in plain or (isinstance(placement, Shard) and placement.dim >= v.dim())
            else distribute_tensor(torch.zeros_like(v), mesh, [placement])
            for k, v in unsharded().items()
        }
        load_sharded(into, folder / "dtensors")
        back = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in into.items()}
        found[f"equal {placement}"] = all(torch.equal(back[k], v) for k, v in unsharded().items())


def save_and_load_fsdp(mesh, folder, found) -> None:
    model, optimizer = fsdp(0, mesh)
    save_sharded(get_model_state_dict(model), folder / "weights")
    save_sharded(flat(get_optimizer_state_dict(model, optimizer)), folder / "optimizer")
    other, its_optimizer = fsdp(1, mesh)
    weights, state = get_model_state_dict(other), get_optimizer_state_dict(other, its_optimizer)
    load_sharded(weights, folder / "weights")
    load_sharded(flat(state), folder / "optimizer")
    set_model_state_dict(other, weights)
    set_optimizer_state_dict(other, its_optimizer, state)
    full = [get_model_state_dict(m, options=_FULL) for m in (model, other)]
    states = [
        flat(get_optimizer_state_dict(m, o, options=_FULL)) for m, o in ((model, optimizer), (other, its_optimizer))
    ]
    found[f"{folder.name} equal"] = all(
        torch.equal(pair[0][k], pair[1][k]) for pair in (full, states) for k in pair[0]
    ) and len(states[0]) == 3 * len(full[0])
    found[folder.name] = (full[0], states[0])


def fail(rank, mesh, folder, found) -> None:
    """Errors of one rank must come out on both."""
    tensors = {"a": distribute_tensor(torch.randn(4000, 50), mesh, [Shard(0)])}
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    error = raised(save_sharded, tensors, folder / "full-disk")
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["full disk"] = (str(error), type(error).__name__, disk_full_reason(error))
    whose = folder / ("dtensors" if rank == 0 else "nowhere")
    found["one rank sees no folder"] = repr(raised(load_sharded, {"even": torch.zeros(8, 3)}, whose))
    odd = {"odd": torch.zeros(3), "even": torch.zeros(3, 8)}
    found["other"] = repr(raised(load_sharded, odd, folder / "dtensors"))
    if rank == 0:
        code_in_a_shard(make_folder(folder / "hostile"), folder / "witness")
    dist.barrier()
    wanted = {name: torch.zeros_like(value) for name, value in GOOD.items() if rank == 1 or name == "b"}
    found["hostile"] = repr(raised(load_sharded, wanted, folder / "hostile"))


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """The folder in which two ranks have saved and loaded, and what each has found."""
    folder = tmp_path_factory.mktemp("group")
    start_ranks(rank_main, (folder,), RANKS)
    return folder, [torch.load(folder / f"found-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def test_two_ranks_save_and_load_under_any_placement(group):
    for found in group[1]:
        assert found["types"] and found["fsdp equal"]
        placements = [key for key in found if key.startswith("equal ")]
        assert len(placements) == 3 and all(found[key] for key in placements)


def test_one_process_reads_shards_of_two_ranks(group):
    folder = group[0] / "dtensors"
    assert len(list(folder.glob("*.distcp"))) == RANKS, "one file per rank"
    into = {name: torch.zeros_like(value) for name, value in unsharded().items()}
    load_sharded(into, folder)
    read = read_sharded(folder)
    assert read.keys() == unsharded().keys()
    for name, value in unsharded().items():
        assert torch.equal(into[name], value) and torch.equal(read[name], value) and read[name].dtype == value.dtype


def test_one_process_reads_fsdp(group):
    for part, expected in zip(("weights", "optimizer"), group[1][0]["fsdp"], strict=True):
        read = read_sharded(group[0] / "fsdp" / part)
        assert read.keys() == expected.keys() and len(read) >= 4
        assert all(torch.equal(read[name], expected[name]) for name in expected)


def test_s1_full_disk_on_one_rank_raises_on_all(group):
    for found in group[1]:
        message, kind, reason = found["full disk"]
        assert kind == "RuntimeError" and reason == os.strerror(errno.EFBIG)
        assert "rank 1 could not write" in message and "\n" not in message


def test_errors_are_raised_on_all_ranks(group):
    folder = group[0]
    for found in group[1]:
        assert found["one rank sees no folder"] == repr(UserError(f"{folder}/nowhere: no such folder"))
        assert "does not match the model: missing odd (3), even is (8, 3), not (3, 8)" in found["other"]
        assert "hostile/__0_0.distcp: refused: it holds posix.system" in found["hostile"]
    assert not (folder / "witness").exists()


GOOD = {"a": torch.randn(100, 10), "b": torch.randn(30)}


def make_folder(path):
    writer = dcp.FileSystemWriter(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(GOOD), storage_writer=writer, no_dist=True)
    return path


def change(folder, edit) -> None:
    """Edit the metadata, as plain pickle reads it."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    edit(metadata)
    path.write_bytes(pickle.dumps(metadata))


def code_in_the_metadata(folder, witness):
    change(folder, lambda metadata: setattr(metadata, "planner_data", {"a": RunsCode(witness)}))


def code_instead_of_the_metadata(folder, witness):
    (folder / ".metadata").write_bytes(pickle.dumps(RunsCode(witness)))


def code_below_an_allowed_module(folder, witness):
    call = b"\x8c\x13torch.serialization\x8c\x09os.system\x93"
    argument = f"touch {witness}".encode()
    argument = b"X" + len(argument).to_bytes(4, "little") + argument
    (folder / ".metadata").write_bytes(b"\x80\x04" + call + argument + b"\x85R.")


def code_in_bytes(folder, witness):
    shutil.rmtree(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({**GOOD, "hook": RunsCode(witness)}, checkpoint_id=folder, no_dist=True)


def state_of_a_class(folder, witness):
    """Pickles can set attributes of the classes that they may name."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (folder / ".metadata").write_bytes(b"\x80\x02" + name + b"(N}X\x06\x00\x00\x00fieldsK\x01stb.")


def code_in_a_shard(folder, witness):
    """The place of the tensor "b" holds a program."""
    shard = folder / "__0_0.distcp"
    offset = shard.stat().st_size
    with open(shard, "ab") as file:
        torch.save([torch.zeros(100), RunsCode(witness)], file)
    move(folder, "b", offset=offset, length=shard.stat().st_size - offset)


def move(folder, name, **place):
    def edit(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                vars(info).update(place)

    change(folder, edit)


def in_a_shard(value):
    """The place of the tensor "b", of shape (30,), holds something else."""

    def edit(folder, witness):
        shard = folder / "__0_0.distcp"
        offset = shard.stat().st_size
        with open(shard, "ab") as file:
            torch.save(value, file)
        move(folder, "b", offset=offset, length=shard.stat().st_size - offset)

    edit.__name__ = f"in a shard {type(value).__name__} {getattr(value, 'shape', '')}"
    return edit


def no_part_of_a_tensor(folder, witness):
    change(folder, lambda metadata: metadata.state_dict_metadata["a"].chunks.clear())


def two_parts_in_one_place(folder, witness):
    """Together as large as the tensor, and half of it would never be read."""

    def halve(metadata):
        (chunk,) = metadata.state_dict_metadata["a"].chunks
        half = type(chunk)(chunk.offsets, torch.Size([50, 10]))
        metadata.state_dict_metadata["a"].chunks[:] = [half, half]

    change(folder, halve)


def place_of_a_tensor_unknown(folder, witness):
    change(folder, lambda metadata: [metadata.storage_data.pop(i) for i in [*metadata.storage_data] if i.fqn == "a"])


def larger_than_its_bytes(folder, witness):
    def edit(metadata):
        tensor = metadata.state_dict_metadata["b"]
        tensor.size = tensor.chunks[0].sizes = torch.Size([10**12])

    change(folder, edit)


def negative(folder, witness):
    move(folder, "a", offset=-10)


def outside(path):
    def edit(folder, witness):
        shutil.copy(folder / "__0_0.distcp", folder.parent / "other.distcp")
        move(folder, "b", relative_path=path.format(folder.parent))

    edit.__name__ = f"outside {path}"
    return edit


def strange_name(folder, witness):
    move(folder, "b", relative_path="x\n\x1b\0" + "y" * 5000)


def compressed(folder, witness):
    move(folder, "b", transform_descriptors=["stream.zstd"])


def cut(name, size):
    def edit(folder, witness):
        os.truncate(folder / name, (folder / name).stat().st_size * size // 100)

    edit.__name__ = f"{name} cut to {size} %"
    return edit


def removed(name):
    def edit(folder, witness):
        (folder / name).unlink()

    edit.__name__ = f"{name} removed"
    return edit


def text(folder, witness):
    (folder / ".metadata").write_text("<html>not found</html>")


def folder_instead_of_a_shard(folder, witness):
    (folder / "__0_0.distcp").unlink()
    (folder / "__0_0.distcp").mkdir()


IN_THE_METADATA = [
    (code_in_the_metadata, "refused: its .metadata holds 'posix.system', which could run code"),
    (code_instead_of_the_metadata, "refused: its .metadata holds 'posix.system', which could run code"),
    (
        code_below_an_allowed_module,
        "refused: its .metadata holds 'torch.serialization.os.system', which could run code",
    ),
    (code_in_bytes, "its .metadata lists 'hook', which is not a tensor"),
    (state_of_a_class, "damaged"),
    (no_part_of_a_tensor, "covers only a part of 'a'"),
    (two_parts_in_one_place, "damaged"),
    (place_of_a_tensor_unknown, "damaged"),
    (larger_than_its_bytes, "damaged"),
    (negative, "damaged"),
    (outside("../other.distcp"), "refused: its .metadata names '../other.distcp', which is not a file of this folder"),
    (outside("{}/other.distcp"), "which is not a file of this folder"),
    (outside(".."), "which is not a file of this folder"),
    (strange_name, "is missing"),
    (compressed, "compressed"),
    (cut(".metadata", 90), "damaged or truncated"),
    (cut(".metadata", 0), "damaged or truncated"),
    (removed(".metadata"), "holds no .metadata"),
    (text, "damaged or truncated"),
    (cut("__0_0.distcp", 99), "'__0_0.distcp' is truncated"),
    (removed("__0_0.distcp"), "'__0_0.distcp' is missing"),
    (folder_instead_of_a_shard, "'__0_0.distcp' is missing"),
]
IN_A_SHARD = [
    (code_in_a_shard, "__0_0.distcp: refused: it holds posix.system, which could run code"),
    (in_a_shard(torch.zeros(31)), "__0_0.distcp: the file is damaged"),
    (in_a_shard(torch.zeros(1)), "__0_0.distcp: the file is damaged"),
    (in_a_shard([0.0] * 30), "__0_0.distcp: the file is damaged"),
]


@pytest.mark.parametrize(
    ("edit", "message", "sees"),
    [(*case, True) for case in IN_THE_METADATA] + [(*case, False) for case in IN_A_SHARD],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_s4_bad_shard_folders_are_one_line_errors_and_run_no_code(tmp_path, recwarn, capfd, edit, message, sees):
    folder, witness = make_folder(tmp_path / "lit_model.pth"), tmp_path / "witness"
    edit(folder, witness)
    made = len(recwarn)
    empty = {name: torch.zeros_like(value) for name, value in GOOD.items()}
    calls = [(read_sharded, folder), (load_sharded, empty, folder), (load_weights, tmp_path)]
    for call in [*calls, (check_sharded, folder)] if sees else calls:
        with pytest.raises(UserError) as error:
            call[0](*call[1:])
        shown = str(error.value)
        assert shown.startswith(str(folder)) and message in shown
        assert shown.isprintable() and len(shown.replace(str(tmp_path), "")) < 300
    assert not witness.exists()
    assert shard_metadata._Record.fields is None
    assert len(recwarn) == made and capfd.readouterr() == ("", ""), "nothing but the one line"


def test_enumerations_as_python_3_11_2_writes_them_are_read(tmp_path, monkeypatch):
    def reduce(member, _):
        return getattr, (type(member), member.name)

    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", reduce)
    folder = make_folder(tmp_path / "lit_model.pth")
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_sharded(folder).keys() == GOOD.keys()


def test_a_large_memo_index_takes_no_memory(tmp_path):
    """pickle's unpickler in C allocates 16 bytes for each index up to the largest."""
    (tmp_path / ".metadata").write_bytes(b"\x80\x04]r" + (2**27).to_bytes(4, "little") + b".")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="damaged or truncated"):
        shard_metadata.read_metadata(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


HOSTILE = [code_in_the_metadata, code_instead_of_the_metadata, code_below_an_allowed_module, code_in_bytes]


@pytest.mark.parametrize("edit", HOSTILE)
def test_s4_payloads_run_when_unpickled(tmp_path, edit):
    folder, witness = make_folder(tmp_path / "x"), tmp_path / "witness"
    edit(folder, witness)
    wanted = {**GOOD, "hook": None} if edit is code_in_bytes else dict(GOOD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        raised(lambda: dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder)))
    assert witness.exists()


def test_empty_state_can_be_sharded(tmp_path):
    save_sharded({}, tmp_path / "optimizer")
    assert is_sharded(tmp_path / "optimizer") and read_sharded(tmp_path / "optimizer") == {}
    assert not is_sharded(tmp_path / "other")


@pytest.mark.parametrize("is_local", [True, False])
def test_m2_read_tensors_are_file_backed(tmp_path, monkeypatch, is_local):
    """Next to the checkpoint, else where TMPDIR says; each tensor in a separate storage."""
    tensors = {"a": torch.randn(700, 101), "b": torch.randn(300, 300).bfloat16(), "small": torch.ones(3)}
    save_sharded(tensors, tmp_path / "step" / "lit_model.pth")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    place = tmp_path / ("step" if is_local else "tmp")
    if not is_local:
        real = scratch._map_file
        unless = {place: place}  # any other folder cannot be written
        monkeypatch.setattr(
            scratch, "_map_file", lambda where, size: real(unless.get(where, tmp_path / "missing"), size)
        )
    read = read_sharded(tmp_path / "step" / "lit_model.pth")
    maps = Path("/proc/self/maps").read_text()
    assert len(re.findall(rf"{re.escape(str(place))}/\.tmp-\S+ \(deleted\)", maps)) == 2
    assert list(tmp_path.rglob(".tmp-*")) == []
    for name, value in tensors.items():
        assert torch.equal(read[name], value) and read[name].untyped_storage().nbytes() == value.nbytes


def test_s1_missing_disk_space_is_a_one_line_error(tmp_path, monkeypatch, small_disk):
    """Not a bus error, in the middle of the numbers."""
    disk, real = small_disk("1m"), scratch._map_file
    save_sharded({"a": torch.randn(100, 10_000)}, tmp_path / "lit_model.pth")
    monkeypatch.setattr(scratch, "_map_file", lambda _, size: real(disk, size))
    with pytest.raises(UserError, match="lit_model.pth: needs 4,000,000 bytes of disk space .* set TMPDIR"):
        read_sharded(tmp_path / "lit_model.pth")
    assert not list(disk.iterdir())
