"""scripts/benchmark.py --matrix: which parts run, what is listed as not run, and the report."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import benchmark_matrix as matrix  # noqa: E402

from toolkit.errors import UserError  # noqa: E402


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Scripts that print a table and write JSON, and one that fails."""
    (tmp_path / "good.py").write_text(
        "import sys, pathlib\nprint('| a |')\npathlib.Path(sys.argv[-1]).write_text('{\"a\": 1}')\n"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(matrix, "SCRIPTS", tmp_path)

    def reading(args):
        """Two that run and one that does not."""
        yield matrix.Run("good", ["good.py", "--x", "a b"])
        yield matrix.Run("bad", ["bad.py"])
        yield matrix.Run("slow", ["slow.py"], max_seconds=0.1)
        yield matrix.Run("peer", [], reason="no environment")

    monkeypatch.setitem(matrix.PARTS, "reading", reading)
    return tmp_path


def test_report_has_every_result_or_its_reason(fakes, tmp_path):
    out = tmp_path / "out"
    assert matrix.main(["--matrix", "--only", "reading", "--out_dir", str(out)]) == 0
    good, bad, slow, peer = json.loads((out / "benchmark.json").read_text())["parts"]["reading"]
    assert (good["values"], good["command"], good["not_run"]) == ({"a": 1}, "good.py --x 'a b'", None)
    assert "exit code 3" in bad["not_run"] and slow["not_run"] == "slow.py was not done after 0 s"
    assert peer["not_run"] == "no environment"
    page = (out / "benchmark.md").read_text()
    for text in (
        "## Reading\n\nTwo that run",
        "### good\n\n| a |",
        "### bad\n\nnot run: bad.py ended",
        "not run: no env",
    ):
        assert text in page, text


def test_rows_and_seconds_select_what_runs(fakes, tmp_path, capsys, monkeypatch):
    words = ["--matrix", "--only", "reading", "--rows", "good, ba,", "--max_seconds", "1", "--out_dir", str(tmp_path)]
    assert matrix.main(words) == 0
    results = json.loads((tmp_path / "benchmark.json").read_text())["parts"]["reading"]
    assert [result["title"] for result in results] == ["good", "bad"]
    assert {result["not_run"] for result in results} == {"no time left, see --max_seconds"}
    assert matrix.main([*words[:3], "--rows", "gpt3", "--out_dir", str(tmp_path)]) == 2
    assert "--rows gpt3: in no title of the parts reading" in capsys.readouterr().err
    limits = {}
    monkeypatch.setattr(matrix, "run_row", lambda run, seconds: limits.update({run.title: seconds}))
    list(matrix.run_part("reading", SimpleNamespace(rows=["good", "slow"]), time.monotonic() + 60))
    assert 50 < limits["good"] <= 60 and limits["slow"] == 0.1


def test_unknown_parts_are_refused(capfd):
    assert benchmark.main(["--matrix", "--only", "trainingg"]) == 2
    assert "did you mean 'training'?" in capfd.readouterr().err


def test_options_of_the_matrix_are_in_the_help_and_refused_without_it(capsys):
    with pytest.raises(SystemExit):
        benchmark.main(["--help"])
    out = capsys.readouterr().out
    assert [flag for flag in ("--matrix", "--quick", "--only", "bf16-master") if flag not in out] == []
    for argv in (["--only", "startup"], ["--quick"], ["--out_dir", "x"]):
        assert benchmark.main(argv) == 2
        assert f"{argv[0]}: has no effect without --matrix" in capsys.readouterr().err
    assert benchmark.main(["--precision", "bf16-master", "--peers", "transformers"]) == 2
    assert "--precision bf16-master: no peer has it" in capsys.readouterr().err


def test_parts_use_options_that_their_scripts_have(tmp_path, monkeypatch):
    """Every part names its scripts, and a missing peer or device is listed with the reason."""

    def refuse(args):
        raise UserError(f"--litgpt_python {args.litgpt_python}: is not a working Python")

    monkeypatch.setattr(matrix, "find_pythons", refuse)
    args = matrix.parse(["--matrix", "--quick", "--litgpt_python", "/nowhere/python", "--out_dir", str(tmp_path)])
    runs = {name: list(part(args)) for name, part in matrix.PARTS.items()}
    reasons = {run.title: run.reason for part in runs.values() for run in part if run.reason}
    assert "--litgpt_python /nowhere/python" in reasons["commands: litgpt"]
    assert any(title.endswith(": litgpt-shipped") for title in reasons)
    for run in (run for part in runs.values() for run in part if not run.reason):
        source = (SCRIPTS / run.words[0]).read_text()
        flags = [word for word in [*run.words[1:], run.json_flag or "--format"] if word.startswith("--")]
        assert [flag for flag in flags if f'"{flag}"' not in source] == [], run.words


@pytest.mark.slow
def test_quick_matrix_runs(tmp_path):
    only = "training,cuda,preparation,checkpoints,startup,reading"
    assert benchmark.main(["--matrix", "--quick", "--only", only, "--threads", "1", "--out_dir", str(tmp_path)]) == 0
    parts = json.loads((tmp_path / "benchmark.json").read_text())["parts"]
    for name in only.split(","):
        assert any(result["not_run"] is None and result["markdown"] for result in parts[name]), name
        failed = [result["not_run"] for result in parts[name] if "exit code" in (result["not_run"] or "")]
        assert not failed, name
