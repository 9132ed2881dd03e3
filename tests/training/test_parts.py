"""Sharded checkpoints of machines without a shared disk: each uploads its files, and rank 0 completes them (S1, S7)."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from helpers.compare_runs import assert_same_weights, rows_of
from helpers.groups import free_port
from helpers.processes import finish, flags_for, pretrain
from helpers.s3 import BUCKET, Faults, serve

from toolkit.checkpoints.manifest import read_manifest
from toolkit.checkpoints.store import file_names
from toolkit.io.checksums import find_damage

pytestmark = pytest.mark.slow
TRAIN = {"max_steps": 12, "save_interval": 4, "keep_last": 2, "log_interval": 1}
SHARDED = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD", "--fsdp.state_dict_type", "sharded"]


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


def start(server, corpus: Path, out_dir: object, folder: Path, n_machines: int = 2, *, swapped: bool = False) -> list:
    """Start a run on machines of one rank, each with a home and a staging folder. ``swapped``: rank 0 on the last."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    for node in range(n_machines):
        machine = folder / str(n_machines - 1 - node if swapped else node)
        words = [*flags_for(corpus, str(out_dir).format(node=node), **TRAIN), *SHARDED]
        words += ["--devices", "1", "--num_nodes", str(n_machines)]
        if str(out_dir).startswith("s3:"):
            words += ["--staging_dir", str(machine / "staging")]
        home = {"HOME": str(machine), "XDG_CACHE_HOME": str(machine / "cache"), "NODE_RANK": str(node)}
        processes.append(pretrain(*words, **(server.environ | home | (address if n_machines > 1 else {}))))
    return processes


def end(processes: list, code: int = 0) -> list[tuple[str, str]]:
    outputs = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [code] * len(processes), outputs
    return outputs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus, server):
    """The folder of a run with a shared disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    end(start(server, corpus, folder / "run", folder))
    return folder / "run"


def download(server, run: str, folder: Path) -> Path:
    for name in server.objects(f"{run}/"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(server.read(f"{run}/{name}"))
    return folder


def delete(server, prefix: str) -> None:
    for name in server.objects(prefix):
        server.client.delete_object(Bucket=BUCKET, Key=f"{prefix}{name}")


def require_equal(server, run: str, undisturbed: Path, folder: Path) -> None:
    """Compare the run on the server with the undisturbed one: weights and losses bit for bit, and the folders."""
    assert {name.split("/")[0] for name in server.objects(f"{run}/")} == {
        "step-00000004", "step-00000008", "final", "logs", "report.html",
    }  # fmt: skip
    download(server, run, folder)
    for name in ("step-00000004", "step-00000008", "final"):
        assert find_damage(folder / name, read_manifest(folder / name)) == {}
        assert set(file_names(folder / name)) == {*read_manifest(folder / name), "COMPLETE"}
        assert_same_weights(folder / name, undisturbed / name)
    assert [row["loss"] for row in rows_of(folder)] == [row["loss"] for row in rows_of(undisturbed)]


def data_keys(folder: Path) -> list[set[str]]:
    """Names of the folders of prepared data on each machine."""
    return [{path.name for path in (folder / node / "cache").glob("toolkit/data/*")} for node in "01"]


def test_s1_machines_without_a_shared_disk_upload_their_parts(server, corpus, undisturbed, tmp_path):
    url = f"s3://{BUCKET}/parts"
    (printed, _), _ = end(start(server, corpus, url, tmp_path / "first"))
    saved = [line.partition("saved ")[2] for line in printed.splitlines() if "saved " in line]
    assert saved == [f"{url}/{name}" for name in ("step-00000004", "step-00000008", "final")], printed
    require_equal(server, "parts", undisturbed, tmp_path / "downloaded")
    for node in "01":
        staging = tmp_path / "first" / node / "staging"
        assert not list(staging.glob("step-*")) and not list(staging.glob(".parts/*"))
    first, second = data_keys(tmp_path / "first")
    assert first == second and first


def test_s2_parts_resume_on_clean_machines_and_on_one_rank(server, corpus, undisturbed, tmp_path):
    url = f"s3://{BUCKET}/resumed"
    end(start(server, corpus, url, tmp_path / "first"))
    delete(server, "resumed/final/")
    outputs = end(start(server, corpus, url, tmp_path / "second"))
    assert all("downloading" in out and "step-00000008" in out for out, _ in outputs)
    require_equal(server, "resumed", undisturbed, tmp_path / "downloaded")
    delete(server, "resumed/final/")
    shutil.copytree(undisturbed, tmp_path / "local")
    shutil.rmtree(tmp_path / "local" / "final")
    end(start(server, corpus, tmp_path / "local", tmp_path / "alone", n_machines=1))
    end(start(server, corpus, url, tmp_path / "third", n_machines=1))
    require_equal(server, "resumed", tmp_path / "local", tmp_path / "downloaded again")


@pytest.mark.parametrize("killed", [1, 0])
def test_s1_machine_killed_before_its_part_is_uploaded_leaves_the_previous_checkpoint(
    server, corpus, undisturbed, tmp_path, killed
):
    """The run continues, also with rank 0 on the other machine, at another address, and a new disk on this one."""
    run = f"killed-{killed}"
    url = f"s3://{BUCKET}/{run}"
    server.faults = Faults(cut_uploads_of=f"step-00000008/lit_model.pth/__{killed}_")
    processes = start(server, corpus, url, tmp_path / "first")
    while not server.faults.done["cut_uploads_of"]:
        time.sleep(0.05)
    os.killpg(processes[killed].pid, signal.SIGKILL)
    _, err = finish(processes[1 - killed])
    finish(processes[killed])
    assert processes[1 - killed].returncode == 1 and f"rank {killed}" in err, err
    server.faults = Faults()
    assert server.checkpoints(run) == {"step-00000004"} and server.objects(f"{run}/step-00000008/")
    shutil.rmtree(tmp_path / "first" / str(killed))
    outputs = end(start(server, corpus, url, tmp_path / "first", swapped=killed == 0))
    assert all("downloading" in out and "step-00000004" in out for out, _ in outputs)
    require_equal(server, run, undisturbed, tmp_path / "downloaded")


@pytest.mark.parametrize("damage", ["missing", "checksum mismatch"])
def test_s7_missing_or_damaged_part_is_named_and_not_used(server, corpus, undisturbed, tmp_path, damage):
    run = f"damaged-{damage[:7]}"
    end(start(server, corpus, f"s3://{BUCKET}/{run}", tmp_path / "first"))
    delete(server, f"{run}/final/")
    (part,) = (name for name in server.objects(f"{run}/step-00000008/") if name.startswith("lit_model.pth/__1_"))
    content, name = server.read(f"{run}/step-00000008/{part}"), f"{run}/step-00000008/{part}"
    delete(server, name)
    if damage != "missing":
        server.client.put_object(Bucket=BUCKET, Key=name, Body=content[:-1] + bytes([content[-1] ^ 1]))
    outputs = end(start(server, corpus, f"s3://{BUCKET}/{run}", tmp_path / "second"))
    assert f"step-00000008: damaged: {part} ({damage}" in outputs[0][0]
    assert "using the next older checkpoint" in outputs[0][0]
    require_equal(server, run, undisturbed, tmp_path / "downloaded")


def test_local_folders_of_two_disks_are_refused(server, corpus, tmp_path):
    outputs = end(start(server, corpus, tmp_path / "{node}" / "run", tmp_path), code=2)
    reason = f"--out_dir {tmp_path}/0/run: rank 1 has another folder there than rank 0; use a folder on a shared disk"
    assert reason in outputs[0][1] and len(outputs[0][1].splitlines()) == 1
