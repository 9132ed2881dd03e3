"""`toolkit report`: pages of finished, damaged and long runs; text from a run cannot run code."""

import json
import re
import shlex
import time
from html.parser import HTMLParser

import pytest

from toolkit.checkpoints.store import write_checkpoint
from toolkit.cli import main
from toolkit.reporting.run import read_run, read_runs
from toolkit.reporting.series import parse_metrics, reduce_lines

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


def write_run(folder, rows="1,10,4.0\n2,20,3.0\n", header="step,tokens,loss", **settings):
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "metrics.csv").write_text(f"{header}\n{rows}")
    launch = {"kind": "launch", "time": 1e9, "settings": {"model_name": "pico-llama"} | settings}
    (folder / "logs" / "events.jsonl").write_text(json.dumps(launch) + '\n{"kind": "sam')
    return folder


def test_page_is_self_contained_and_escapes_what_the_run_wrote(tmp_path, capsys):
    run = write_run(tmp_path / "run", header=f"step,tokens,{EVIL}", out_dir=EVIL)
    sample = {"kind": "sample", "step": 2, "prompt": EVIL, "text": EVIL}
    with open(run / "logs" / "events.jsonl", "a") as file:
        file.write("\n" + json.dumps(sample) + "\n" + json.dumps({"kind": "warning", "text": EVIL}) + "\n")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    tags = Tags(page).tags
    assert tags.count("script") == 2 and "img" not in tags and page.count("&lt;script&gt;alert(1)") >= 4
    assert not re.search(r"(src|href)=", re.sub(r"&lt;.*?&gt;", "", page.partition("<script")[0]))
    assert f"wrote {run / 'report.html'}: 1 run" in capsys.readouterr().out
    assert main(["report", str(run), "--format", "md"]) == 0
    assert "<script>" not in capsys.readouterr().out.replace(f"--out_dir {shlex.quote(EVIL)}", "")


def test_several_runs_as_words_or_with_commas(tmp_path, monkeypatch, capsys):
    a, b = (str(write_run(tmp_path / n, seed=s)) for n, s in (("a", 1), ("b", 2)))
    monkeypatch.chdir(tmp_path)
    assert main(["report", a, b]) == 0 and "2 runs" in capsys.readouterr().out
    assert main(["report", "--run_dirs", f"{a},{b}", "--format", "md"]) == 0
    assert "| seed | 42 | 1 | 2 |" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for place, message in ((tmp_path / "none", "no such folder"), (tmp_path / "empty", "is no run")):
        assert main(["report", str(place)]) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1


def test_torn_foreign_and_nan_rows_become_a_note(tmp_path):
    rows = "1,10,4.0\nfoo,bar,baz\n2,20,nan\n3,30,\n4,40,2.0\n5,50"
    run = read_run(write_run(tmp_path / "run", rows))
    assert run.columns["step"].tolist() == [1, 2, 3, 4]
    assert run.notes == ["2 rows of logs/metrics.csv are torn or foreign and left out"]
    assert parse_metrics(b"epoch,acc\n1,2\n") == ({}, 1)


def test_command_repeats_the_run(tmp_path):
    """The command resolves to the recorded settings."""
    from toolkit.config import TrainArgs
    from toolkit.planning.run_args import hyperparameters
    from toolkit.planning.training_options import pretrain

    args = pretrain("pico-llama", train=TrainArgs(max_steps=7, learning_rate=1e-3), out_dir="a b")
    settings = json.loads(json.dumps(hyperparameters(args)))
    run = read_run(write_run(tmp_path / "run", **settings))
    assert shlex.split(run.command)[:3] == ["toolkit", "pretrain", "pico-llama"]
    assert "--train.max_steps 7" in run.command and "--out_dir 'a b'" in run.command
    assert set(run.changed) == {
        "model_name",
        "train.max_steps",
        "train.learning_rate",
        "train.keep_last",
        "out_dir",
    } - {name for name in ("train.keep_last",) if args.train.keep_last == 3}


def test_checkpoints_and_their_checks(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("step-00000001", "final"):
        write_checkpoint(run / name, lambda tmp: (tmp / "lit_model.pth").write_bytes(b"weights"))
    facts = read_run(run)
    assert facts.status == "finished" and [c.check for c in facts.checkpoints] == ["complete, sizes match"] * 2
    (run / "final" / "lit_model.pth").write_bytes(b"WEIGHTS")
    assert [c.check for c in read_run(run, verify=True).checkpoints if c.is_intact] == ["checksums verified"]


def test_long_runs_keep_their_spikes_and_stay_small():
    lines = [f"{i},{i * 512},{3 + i % 7},0.1,1.5,,{9000 + i % 5}" for i in range(1, 200_001)]
    lines[123_456] = "123457,63209984,77,0.1,1.5,,9000"
    content = ("step,tokens,loss,learning_rate,grad_norm,mfu,tokens_per_sec\n" + "\n".join(lines) + "\n").encode()
    started = time.perf_counter()
    columns, n_lost = parse_metrics(content)
    reduced = reduce_lines(columns, 2000)
    print(f"{time.perf_counter() - started:.2f} s")
    assert n_lost == 0 and "mfu" not in columns
    assert len(reduced["loss"]["raw"][0]) <= 2003 and max(reduced["loss"]["raw"][2]) == 77


def test_remote_run(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    run = write_run(tmp_path / "run")
    for name in ("metrics.csv", "events.jsonl"):
        fsspec.filesystem("memory").pipe(f"/report/run/logs/{name}", (run / "logs" / name).read_bytes())
    (facts,) = read_runs(["memory://report/run"])
    assert facts.columns["loss"].tolist() == [4.0, 3.0] and facts.settings["model_name"] == "pico-llama"
