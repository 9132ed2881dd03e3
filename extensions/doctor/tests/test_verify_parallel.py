"""`toolkit verify_parallel`: good layouts pass, a skewed gradient on one rank fails with its step and parameter."""

import re

import pytest
from helpers.groups import Case, free_port, run_group
from helpers.processes import Forked, finish, start
from helpers.talker import make_talker

from toolkit import cli
from toolkit.checkpoints.store import newest_first

VERIFY = "verify_parallel pretrain"
PARAMETER = "transformer.h.1.mlp.fc_1.weight"


@pytest.fixture(scope="module")
def flags(corpus) -> list[str]:
    return [
        "pico-llama", "--steps", "3", "--accelerator", "cpu", "--strategy", "fsdp", "--data", "TextFiles",
        "--data.train_data_path", str(corpus), "--data.vocab_size", "300", "--train.global_batch_size", "8",
        "--train.micro_batch_size", "2",
        "--train.max_seq_length", "32", "--train.max_tokens", "1e9", "--train.learning_rate", "1e-3",
    ]  # fmt: skip


def rows_of(shown: str) -> list[list[str]]:
    return [line.split() for line in shown.splitlines() if re.match(r" +\d+ ", line)]


SKEW = ["--callbacks", "helpers.faulty_callbacks.SkewGradient"]


@pytest.mark.slow
def test_a_good_layout_passes_and_a_skewed_gradient_is_named(tmp_path, flags):
    cases = [
        Case("good", flags, command=VERIFY),
        Case("skewed", [*flags, *SKEW], command=VERIFY, fault="by a callback"),
    ]
    found = run_group(tmp_path, 2, cases, [])
    assert [[rank["exit"] for rank in found[case.name]] for case in cases] == [[0, 0], [3, 3]]
    shown = (tmp_path / "group-of-2-0" / "0.out").read_text()
    _, passed, skewed = shown.split("Comparing 3 steps of pretrain, 32-true, global batch 8")
    assert len(rows_of(passed)) == len(rows_of(skewed)) == 3
    for step, (number, *cells) in enumerate(rows_of(passed), 1):
        assert int(number) == step and len(cells) == 7
        assert float(cells[0]) == pytest.approx(float(cells[1]), rel=1e-5) and float(cells[0]) > 4
        assert all(float(cells[i]) <= 1e-5 for i in (2, 5, 6))
    assert "passed: 3 steps on 2 ranks equal those on one process" in passed
    error = "toolkit verify_parallel: step 2: differs from one process in "
    assert re.search(rf"^{error}.*a parameter's gradient by .* most in {PARAMETER}$", skewed, re.M)
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and newest_first(path)]  # nothing is saved


@pytest.mark.slow
def test_ddp_passes_and_different_copies_of_a_gradient_are_named(tmp_path, flags):
    ddp = [*flags, "--strategy", "ddp"]
    cases = [Case("good", ddp, command=VERIFY), Case("skewed", [*ddp, *SKEW], command=VERIFY, fault="by a callback")]
    found = run_group(tmp_path, 2, cases, [])
    assert [[rank["exit"] for rank in found[case.name]] for case in cases] == [[0, 0], [3, 3]]
    shown = (tmp_path / "group-of-2-0" / "0.out").read_text()
    assert "passed: 3 steps on 2 ranks" in shown
    named = f"the gradient of {PARAMETER} differs between ranks 0 and 1, which hold the same part of it"
    assert shown.splitlines()[-1].startswith(f"toolkit verify_parallel: step 2: {named}: it was not reduced")


@pytest.mark.slow
def test_bf16_and_hybrid_sharding_pass(tmp_path, flags):
    mixed = ["--precision", "bf16-mixed"]
    cases = [
        Case("mixed", [*flags, *mixed], command=VERIFY),
        Case("ddp-mixed", [*flags, *mixed, "--strategy", "ddp"], command=VERIFY),
    ]
    run_group(tmp_path, 2, cases, [])
    shown = (tmp_path / "group-of-2-0" / "0.out").read_text()
    assert shown.count("passed: 3 steps on 2 ranks") == 2 and "micro batch 1, for the tolerance of bf16-mixed" in shown
    run_group(tmp_path, 4, [Case("hybrid", [*flags], nodes=2, command=VERIFY)], [])


@pytest.mark.slow
def test_adapters_pass_with_their_dropout(tmp_path):
    talker = make_talker(tmp_path / "talker")
    rows = tmp_path / "rows.json"
    rows.write_text("[" + ",".join(f'{{"instruction": "{i}", "output": "{i % 7}"}}' for i in range(100)) + "]")
    flags = [str(talker), "--accelerator", "cpu", "--steps", "2", "--lora_dropout", "0.1", "--resume", "auto"]
    flags += ["--data", "JSON", "--data.json_path", str(rows), "--train.global_batch_size", "4"]
    run_group(tmp_path, 2, [Case("lora", flags, command="verify_parallel finetune_lora")], [])
    shown = (tmp_path / "group-of-2-0" / "0.out").read_text()
    assert "passed: 2 steps" in shown and "--resume auto" in shown


@pytest.mark.slow
def test_processes_that_it_starts_and_torchrun(flags):
    process = Forked([*VERIFY.split(), *flags, "--devices", "2"])
    out, err = finish(process)
    assert (process.returncode, err) == (0, "") and out.count("passed: 3 steps on 2 ranks") == 1
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={free_port()}", "-m", "toolkit"]
    process = start(*torchrun, *VERIFY.split(), *flags)
    out, err = finish(process)
    assert process.returncode == 0 and out.count("passed: 3 steps on 2 ranks") == 1, err


@pytest.mark.slow
def test_one_process_that_is_killed_is_reported(flags, capsys):
    killed = ["--devices", "2", "--callbacks", "helpers.faulty_callbacks.KillAlone"]
    assert cli.main([*VERIFY.split(), *flags, *killed]) == 1
    error = "toolkit verify_parallel: one process: was killed or crashed; possibly out of memory "
    error += "(see troubleshooting: out of memory)\n"
    assert capsys.readouterr().err == error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "1"], "--devices 1: a single process has nothing to compare"),
        (["--devices", "2", "--steps", "0"], "--steps 0: must be greater than zero"),
        (["--devices", "3"], "--train.global_batch_size 64: not a multiple of 3 "),
    ],
)
def test_user_errors(words, message, capsys):
    assert cli.main([*VERIFY.split(), "pico-llama", "--accelerator", "cpu", *words]) == 2
    assert capsys.readouterr().err.startswith(f"toolkit verify_parallel: {message}")


def test_command_must_come_first_and_a_used_out_dir_is_no_error(capsys, tmp_path):
    assert cli.main(["verify_parallel", "--devices", "2", "pretrain"]) == 2
    assert "the command to verify must come first, one of pretrain, finetune_full" in capsys.readouterr().err
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "metrics.csv").touch()
    flags = ["--out_dir", str(tmp_path), "--accelerator", "cpu", "--devices", "1"]
    assert cli.main([*VERIFY.split(), "pico-llama", *flags]) == 2
    assert "nothing to compare" in capsys.readouterr().err
