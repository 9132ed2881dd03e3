"""The S3 trial: runs against an S3 server on loopback that fails, with kills; resumed on clean machines.

``pytest -s`` prints the log of faults and outcomes.
"""

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from helpers.compare_runs import assert_same_weights, rows_of
from helpers.groups import read_until
from helpers.processes import finish, flags_for, pretrain
from helpers.s3 import BUCKET, Faults, serve

pytestmark = pytest.mark.slow
TRAIN = {"max_steps": 40, "save_interval": 4, "keep_last": 2, "log_interval": 1}
FLAKY = {"error_500": 0.08, "slow_down_503": 0.03, "cut_request": 0.03, "cut_response": 0.03}


@pytest.fixture(scope="module")
def server():
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """Folders of local runs, by their number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for n_ranks in (1, 2):
        process = pretrain(*flags_for(corpus, folder / str(n_ranks), **TRAIN), "--devices", str(n_ranks))
        _, err = finish(process)
        assert process.returncode == 0, err
    return folder


class Launch:
    """One launch of a run on the server, with a separate staging folder, whose disk use is sampled."""

    def __init__(self, server, corpus: Path, run: str, staging: Path, n_ranks: int = 1, *flags: str, **environ: str):
        url, self.staging = f"s3://{BUCKET}/{run}", staging
        words = [*flags_for(corpus, url, **TRAIN), "--staging_dir", str(staging), "--devices", str(n_ranks), *flags]
        self.process = pretrain(*words, **(server.environ | environ))
        self.most_copies, self._ended = 0, threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        """Count the checkpoints whose weights take space, complete or not, hard links once."""
        while not self._ended.wait(0.01):
            inodes = set()
            for root, _, names in os.walk(self.staging):
                for name in names:
                    try:
                        inodes |= {os.stat(Path(root, name)).st_ino} if name.startswith("lit_model.pth") else set()
                    except OSError:
                        continue
            self.most_copies = max(self.most_copies, len(inodes))

    def end(self, code: int) -> tuple[str, str]:
        out, err = finish(self.process, 600)
        self._ended.set()
        assert self.process.returncode == code, (self.process.returncode, out, err)
        assert "secret" not in out + err and "Traceback" not in err, err
        return out, err

    def kill(self) -> bool:
        """Kill all processes. Return True."""
        os.killpg(self.process.pid, signal.SIGKILL)
        finish(self.process)
        self._ended.set()
        return True


def require_equal(server, run: str, undisturbed: Path, folder: Path) -> None:
    """Compare the run on the server with the undisturbed local one: weights and losses bit for bit; keep_last."""
    for name in server.objects(f"{run}/final/"):
        target = folder / "downloaded" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(server.read(f"{run}/final/{name}"))
    metrics = folder / "logs" / "metrics.csv"
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_bytes(server.read(f"{run}/logs/metrics.csv"))
    assert_same_weights(folder / "downloaded", undisturbed / "final")
    assert [row["loss"] for row in rows_of(folder)] == [row["loss"] for row in rows_of(undisturbed)]
    assert server.checkpoints(run) == {"step-00000032", "step-00000036", "final"}
    folders = {name.split("/")[0] for name in server.objects(f"{run}/")}
    assert folders == {"step-00000032", "step-00000036", "final", "logs", "report.html"}  # forked runs draw no plot


def unfinished(server, run: str) -> bool:
    """Whether a kill has left a checkpoint on the server without COMPLETE."""
    folders = {name.split("/")[0] for name in server.objects(f"{run}/")} - {"logs", "report.html", ".lease.json"}
    return bool(folders - server.checkpoints(run))


@pytest.mark.parametrize("n_ranks", [1, 2])
@pytest.mark.parametrize("faults", [{}, FLAKY, {"bytes_per_second": 3e6}], ids=["none", "flaky", "slow"])
def test_s2_run_killed_at_random_instants_is_bit_equal_on_clean_machines(
    server, corpus, undisturbed, tmp_path, n_ranks, faults
):
    chance, run = random.Random(n_ranks), f"killed-{n_ranks}-{'-'.join(faults)[:10]}"
    server.faults = Faults(**faults)
    kills, in_upload, downloads, most_copies, n_launches = 0, 0, 0, 0, 0
    while True:
        n_launches += 1
        launch = Launch(server, corpus, run, tmp_path / f"machine-{n_launches}", n_ranks)
        if kills < 6:
            read_until(launch.process, chance.choice(["Training", "saved", "saved"]))
            time.sleep(chance.uniform(0, 2))
        try:
            is_killed = kills < 6 and launch.kill()
        except ProcessLookupError:
            is_killed = False  # it has ended before
        if is_killed:
            kills += 1
            in_upload += unfinished(server, run)
        out = "" if is_killed else launch.end(0)[0]
        most_copies = max(most_copies, launch.most_copies)
        downloads += (launch.staging / "logs").exists()
        if out:
            break
    require_equal(server, run, undisturbed / str(n_ranks), tmp_path / "end")
    assert most_copies <= 4 and kills
    print(
        f"\nTRIAL {n_ranks} ranks, {faults or 'no faults'}: {kills} kills on clean machines, {in_upload} within an "
        f"upload; requests {sum(server.faults.requests.values())}, injected {dict(server.faults.done)}; at most "
        f"{most_copies} copies of the weights on the local disk; bit-equal"
    )


@pytest.mark.parametrize("faults", [{"is_refused": True}, {"full_after": 0}, {"full_after": 0, "full_status": 507}])
def test_storage_that_fails_during_a_run_ends_it_with_exit_3_and_the_next_launch_uploads(
    server, corpus, undisturbed, tmp_path, faults
):
    run, server.faults = f"fails-{'-'.join(faults)}", Faults(bytes_per_second=3e6)
    launch = Launch(server, corpus, run, tmp_path / "staging")
    read_until(launch.process, "saved")
    server.faults = Faults(**faults)
    out, err = launch.end(3)
    assert len(err.splitlines()) == 1 and "final could not be uploaded" in err
    assert f"it is complete in {tmp_path}/staging/final, and the same command with --resume auto uploads it" in err
    named = re.findall(r"warning: (.*) could not be uploaded", out)
    n_lines = len(named)
    assert n_lines == len(set(named)) and {"step-00000036", "final", "logs"} <= set(named)
    server.faults = Faults()
    again, _ = Launch(server, corpus, run, tmp_path / "staging").end(0)
    assert "nothing to do" in again and "final" in server.checkpoints(run)
    print(f"\nTRIAL {faults} after the first checkpoint: exit 3, {n_lines} lines, next launch: exit 0\n  {err.strip()}")


def test_storage_that_cannot_be_used_is_one_line_and_exit_2(server, corpus, tmp_path):
    cases = {
        "wrong key": (Faults(), {"AWS_ACCESS_KEY_ID": "AKIAWRONG"}, "access denied (InvalidAccessKeyId)"),
        "no credentials": (Faults(), {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials"),
        "no server": (Faults(), {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the storage does not respond"),
        "full bucket": (Faults(full_after=0), {}, "the storage is full (QuotaExceeded)"),
        "always 500": (Faults(error_500=1.0), {}, "the storage failed (InternalError, HTTP status 500)"),
    }
    for name, (faults, environ, expected) in cases.items():
        server.faults = faults
        out, err = Launch(server, corpus, "refused", tmp_path / "staging", 1, **environ).end(2)
        assert expected in err and len(err.splitlines()) == 1 and "Training" not in out, (name, out, err)
        print(f"\nTRIAL {name}: exit 2\n  {err.strip()}")
    assert server.objects("refused/") == {}


def test_flaky_storage_delays_a_run_and_changes_nothing(server, corpus, undisturbed, tmp_path):
    """Also with data workers, which are forked while requests are under way; and with --train.async_save."""
    cases = {"flaky": (FLAKY, "--data.num_workers 2"), "slow": ({"bytes_per_second": 1e6}, "--train.async_save true")}
    for name, (values, flags) in cases.items():
        server.faults = Faults(**values)
        launch = Launch(server, corpus, name, tmp_path / name, 1, *flags.split())
        out, _ = launch.end(0)
        require_equal(server, name, undisturbed / "1", tmp_path / f"end-{name}")
        assert "warning" not in out and launch.most_copies <= 4
        counts = f"{sum(server.faults.requests.values())} requests, injected {dict(server.faults.done)}"
        print(f"\nTRIAL {values}: exit 0, bit-equal, {counts}, {launch.most_copies} copies of the weights locally")


def test_sigterm_uploads_the_checkpoint_and_a_second_run_is_refused(server, corpus, undisturbed, tmp_path):
    for n_ranks in (1, 2):
        run, server.faults = f"signal-{n_ranks}", Faults(bytes_per_second=1e6)  # it does not end before the signal
        launch = Launch(server, corpus, run, tmp_path / f"first-{n_ranks}", n_ranks)
        read_until(launch.process, "saved")
        if n_ranks == 1:
            _, err = Launch(server, corpus, run, tmp_path / "second").end(2)
            assert f"s3://{BUCKET}/{run}: another run is alive there (process {launch.process.pid} on " in err
            print(f"\nTRIAL second run: exit 2\n  {err.strip()}")
        launch.process.send_signal(signal.SIGTERM)
        server.faults = Faults()
        _, err = launch.end(128 + signal.SIGTERM)
        assert newest_step(launch.staging) in server.checkpoints(run)
        Launch(server, corpus, run, tmp_path / f"third-{n_ranks}", n_ranks).end(0)
        require_equal(server, run, undisturbed / str(n_ranks), tmp_path / f"end-{n_ranks}")
        print(f"\nTRIAL SIGTERM, {n_ranks} ranks: exit 143, uploaded; resumed on a clean machine, bit-equal")


def newest_step(staging: Path) -> str:
    return max(path.name for path in staging.glob("step-*"))
