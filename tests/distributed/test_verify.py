"""S7 verified-bytes across ranks: every rank lists its own shards, and all agree on the checkpoint to resume from."""

import shutil

import pytest
from helpers.damage import flip
from helpers.groups import Case, losses, run_group

from toolkit.checkpoints.manifest import read_manifest
from toolkit.cli import main


@pytest.mark.slow
def test_s7_all_ranks_skip_a_checkpoint_with_a_damaged_shard(tmp_path, shared_flags):
    fsdp = ["--strategy", "fsdp", "--fsdp.sharding_strategy", "FULL_SHARD", "--fsdp.state_dict_type", "sharded"]
    flags = [*fsdp, "--train.save_interval", "4", "--train.keep_last", "1", "--train.max_steps", "10"]
    run_group(tmp_path, 2, [Case("run", flags)], shared_flags)
    newest = tmp_path / "run" / "step-00000008"
    for folder in ("lit_model.pth", "trainer/optimizer"):
        assert {f"{folder}/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")} <= {
            *read_manifest(newest)
        }
    assert main(["verify", str(tmp_path / "run")]) == 0
    expected = losses(tmp_path / "run")

    shutil.move(tmp_path / "run" / "final", tmp_path / "final")
    shutil.copytree(newest, tmp_path / "run" / "step-00000009")
    shard = tmp_path / "run" / "step-00000009" / "lit_model.pth" / "__1_0.distcp"
    flip(shard)
    run_group(tmp_path, 2, [Case("again", [*flags, "--resume", "auto"], out="run")], shared_flags)
    shown = (tmp_path / "group-of-2-1" / "0.out").read_text()
    assert "lit_model.pth/__1_0.distcp (checksum mismatch" in shown and "step-00000008: step 8" in shown
    assert (tmp_path / "run" / "damaged-step-00000009").is_dir() and losses(tmp_path / "run") == expected
