"""`toolkit doctor --prove`: its rows on a CPU, and what it says of failures and of machines without CUDA."""

import json
import math
import shutil
import time

import pytest
import torch
from helpers.flash import newer_flash
from toolkit_doctor import prove_kernels, prove_runs
from toolkit_doctor.prove import ROWS, prove
from toolkit_doctor.prove_kernels import KERNELS
from toolkit_doctor.prove_row import Machine, NotRunError, Outcome, Row, metrics_of
from toolkit_doctor.prove_runs import RUNS

from toolkit import cli, load
from toolkit.checkpoints.weights import load_weights, save_weights
from toolkit.errors import CommandError, UserError
from toolkit.models.quantize import quantize_linears

NEEDS_CUDA = {row.name for row in KERNELS if row.name.startswith(("flash", "flex"))} | {
    "loss, Triton", "loss, Triton, odd vocabulary", "loss, compiled", "CUDA graph"
}  # fmt: skip


def results_of(path):
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def raises(error):
    def run(machine):
        raise error

    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_nothing_is_run(capsys, tmp_path):
    assert cli.main(["doctor", "--prove", "--json_path", str(tmp_path / "rows.json")]) == 0
    out, results = capsys.readouterr().out, results_of(tmp_path / "rows.json")
    assert out.splitlines()[0].startswith("Proof on no CUDA device, torch ")
    assert out.splitlines()[-1] == f"0 held, 0 failed, {len(ROWS)} not run" and "\x1b" not in out
    assert len(results) == len(ROWS), "names are not unique"
    assert {(row["result"], row["reason"]) for row in results.values()} == {("not run", "no CUDA device")}


def test_what_fails_is_named_with_the_option_that_avoids_it(capsys, tmp_path):
    path = tmp_path / "rows.json"
    rows = [
        Row("good", "a and b", "--a", lambda machine: Outcome(0.5, 0.5)),
        Row("far", "a and b", "--b 1", lambda machine: Outcome(0.6, 0.5)),
        Row("nan", "a and b", "--c", lambda machine: Outcome(math.nan, 0.5)),
        Row("raises", "a and b", "--d", raises(RuntimeError("no kernel\nmore"))),
        Row("exits", "a and b", "--e", lambda machine: machine.command("no-such-command")),
        Row("missing", "a and b", "--f", raises(NotRunError("one GPU"))),
        Row("package", "a and b", "--g", raises(UserError("--quantize: needs bitsandbytes"))),
    ]
    with pytest.raises(CommandError, match="4 of 7 rows failed: far; nan; raises; exits$") as caught:
        prove(str(path), rows, "cpu")
    assert caught.value.exit_code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 held, 4 failed, 2 not run" and len(lines) == 10
    for text in ("held [a and b]", "FAILED: avoid with --b 1 [", "FAILED: avoid with --c: the difference is not finite",
                 "--d: RuntimeError: no kernel more [", "not run: one GPU [",
                 "not run: --quantize: needs bitsandbytes ["):  # fmt: skip
        assert sum(text in line for line in lines) == 1, text
    assert "no-such-command: no such command" in results_of(path)["exits"]["reason"]


def test_no_row_starts_after_the_end_of_the_time(capsys):
    prove(None, KERNELS[:2], "cpu", seconds=0)
    assert capsys.readouterr().out.count("not run: no time left") == 2


def test_kernels_on_a_cpu(tmp_path):
    prove(str(tmp_path / "rows.json"), KERNELS, "cpu")
    results = results_of(tmp_path / "rows.json")
    assert {name for name, row in results.items() if row["reason"] == "needs CUDA"} == NEEDS_CUDA
    assert all(row["result"] == "held" for name, row in results.items() if name not in NEEDS_CUDA)


@pytest.mark.parametrize("name", ["fused_attention", "head_loss", "grouped_product", "mm_out_fp32"])
def test_wrong_kernels_fail(name, monkeypatch):
    right = getattr(prove_kernels, name)

    def wrong(*args, **kwargs):
        if name == "mm_out_fp32":
            right(*args)
            args[0].mul_(1.001)
            return None
        return 1.001 * right(*args, **kwargs)

    monkeypatch.setattr(prove_kernels, name, wrong)
    rows = [row for row in KERNELS if row.name in ("attention, grouped", "loss", "experts", "fp32 products")]
    with pytest.raises(CommandError, match="^1 of 4 rows failed"):
        prove(None, rows, "cpu")


def test_flash_rows_use_what_a_run_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(Machine, "require_cuda", lambda self: None)
    rows = [row for row in KERNELS if row.name in ("flash, windows", "flash, packed rows")]
    path = tmp_path / "rows.json"
    with newer_flash("FA3", faults={"FA3": "packed"}) as called, pytest.raises(CommandError, match="^1 of 2 rows"):
        prove(str(path), rows, "cpu")
    assert called == {("FA3", False), ("FA3", True)}
    failed = results_of(path)["flash, packed rows"]
    assert failed["result"] == "failed" and failed["reason"].startswith("FlashAttention 3 in torch.bfloat16 on cpu: a ")


@pytest.mark.slow
def test_runs_on_a_cpu(tmp_path):
    prove(str(tmp_path / "rows.json"), RUNS, "cpu")
    reasons = {row["name"]: row["reason"] for row in results_of(tmp_path / "rows.json").values() if row["reason"]}
    assert reasons == {
        "fp16 scaler": "needs CUDA",
        "fp8 all-gather": "one GPU",
        "FSDP": "one GPU",
        "collectives": "one GPU",
        "planned memory": "needs CUDA",
        "predicted speed": "needs CUDA",
    }


@pytest.mark.slow
def test_the_reference_of_qlora_is_lora_on_the_dequantized_weights(tmp_path):
    pytest.importorskip("bitsandbytes")
    machine = Machine(torch.device("cpu"), 1, tmp_path, time.monotonic() + 600)
    assert prove_runs._qlora(machine).figure == 0
    ((command, out),) = machine.runs.items()  # on a CPU, the run is its reference
    plain, restored = tmp_path / "base", tmp_path / "restored"
    state, model = dict(load_weights(plain)), load(plain)
    quantize_linears(model, "bnb.nf4")
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "base_weight")}
    state |= {f"{name}.weight": layer.base_weight() for name, layer in layers.items()}
    shutil.copytree(plain, restored)
    save_weights(state, restored / "lit_model.pth")

    def curve(base):
        words = command.replace(" --quantize bnb.nf4", "").replace(str(plain), str(base))
        folder = out if base is None else machine.train("", command=words)
        return [metrics_of(folder, name) for name in ("loss", "grad_norm")]

    quantized = curve(None)
    assert quantized == curve(restored)
    norms = zip(quantized[1], curve(plain)[1], strict=True)
    assert max(abs(a / b - 1) for a, b in norms) > 1e-3  # the row's tolerance tells 4 bits from 32


def test_a_wrong_curve_and_a_wrong_resume_fail(monkeypatch, tmp_path):
    """With metrics and weights in place of runs."""
    losses = {"a": [6.0, 5.0], "b": [6.0, 5.1]}
    monkeypatch.setattr(prove_runs, "metrics_of", lambda out, name: losses[out.name])
    monkeypatch.setattr(prove_runs, "load_weights", lambda folder: {"w": torch.ones(2) * (folder.parent.name == "a")})

    class Machine:
        def train(self, options, device=""):
            return tmp_path / ("b" if options in ("--precision 32-true", "--deterministic true") else "a")

    assert prove_runs._curve("--precision bf16-true", 0.01, Machine()).figure == pytest.approx(0.1 / 5.1)
    assert prove_runs._weights("--deterministic true --train.async_save true", "final", Machine()) == (1, 0)
