"""`toolkit report`: pages of finished, running, damaged and long runs; text from a run cannot run code."""

import json
import os
import re
import shutil
import subprocess
import time
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers.browser import find_browser, open_browser
from helpers.cases import check_each
from helpers.processes import common_flags, finish, pretrain
from helpers.saving import write_checkpoint
from helpers.small_runs import text_data
from toolkit_report import page
from toolkit_report.page import render_page, write_report
from toolkit_report.run import read_run, read_runs
from toolkit_report.series import parse_metrics, reduce_lines, smooth

from toolkit.checkpoints.lock import exclusive_lock
from toolkit.checkpoints.manifest import parse_manifest
from toolkit.cli import main
from toolkit.cli.parser import parse
from toolkit.errors import UserError
from toolkit.io.safe_parse import MAX_BYTES
from toolkit.io.storage import Storage, StorageError
from toolkit.planning.training_options import run_args
from toolkit.training.hyperparameters import hyperparameters
from toolkit.ui.console import make_progress
from toolkit.ui.events import parse_events, write_event
from toolkit.ui.loggers import MetricsCSV

EVIL = "</script><script>document.title='evil'</script><img src=x onerror=\"document.title='evil'\">"


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)


def write_run(folder: Path, rows="1,10,4.0\n2,20,3.0\n", header="step,tokens,loss", **settings) -> Path:
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "metrics.csv").write_text(f"{header}\n{rows}")
    write_event(folder, "launch", settings={"model_name": "pico-llama"} | settings)
    return folder


@pytest.fixture
def evil(tmp_path) -> Path:
    """A run with a script tag wherever a user or the data can write text."""
    run = write_run(tmp_path / "run", header=f"step,tokens,{EVIL.replace(',', ' ')}", out_dir=EVIL)
    write_event(run, "sample", step=EVIL, prompt=EVIL, text=EVIL)
    write_event(run, "warning", text=EVIL)
    write_event(run, "end", error=EVIL)
    return run


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> tuple[Path, str]:
    """A run with samples and a note; what it printed."""
    out_dir = tmp_path_factory.mktemp("finished") / "run"
    flags = {"max_steps": 12, "micro_batch_size": "auto", "activation_checkpointing": "full"}
    words = [*text_data(corpus), *common_flags(out_dir, **flags)]
    process = pretrain(*words, "--eval.interval", "4", "--eval.max_new_tokens", "5")
    out, err = finish(process)
    assert process.returncode == 0, err
    return out_dir, out + err


def test_run_records_what_its_report_needs(finished):
    out_dir, shown = finished
    run = read_run(out_dir)
    assert f"report: {out_dir}/report.html" in shown and "finished" in run.status
    assert run.warnings == ["--eval.interval: given 2 times; using the last value"] and run.warnings[0] in shown
    assert [sample["step"] for sample in run.samples] == [4, 8]
    assert run.launch["devices"] == "1 x cpu" and run.launch["precision"] == "32-true"
    assert "precision" not in run.changed and "train.micro_batch_size" not in run.changed
    page = (out_dir / "report.html").read_text()
    assert "Finished at step 12, on 1 x cpu, started on 20" in page and run.samples[-1]["text"].split()[0] in page
    assert page.index("after step 8<") < page.index("after step 4<")


def test_failed_report_is_a_note_and_not_the_end_of_the_run(corpus, tmp_path):
    (tmp_path / "run" / "report.html").mkdir(parents=True)
    (tmp_path / "run" / "report.html" / "file").touch()
    process = pretrain(*text_data(corpus), *common_flags(tmp_path / "run", max_steps=2))
    out, err = finish(process)
    assert process.returncode == 0 and out.count("note: report.html was not written: ") == 1, out + err


def test_page_is_self_contained_and_escapes_what_the_run_wrote(evil, capsys):
    assert main(["report", str(evil)]) == 0
    assert f"wrote {evil / 'report.html'}: 1 run" in capsys.readouterr().out
    page = (evil / "report.html").read_text()
    tags = Tags(page).tags
    assert tags.count("script") == 2 and "img" not in tags and page.count("&lt;script&gt;") >= 6
    assert not re.search(r"(src|href)=", page.partition("<main>")[0])
    assert main(["report", str(evil), "--format", "md"]) == 0
    markdown = re.sub("```.*?```", "", capsys.readouterr().out, flags=re.DOTALL)
    assert "<script>" not in markdown and "&lt;script&gt;" in markdown


def test_browser_draws_zooms_and_runs_no_text_of_the_run(finished, evil, tmp_path):
    if (browser := find_browser()) is None:
        pytest.skip("no Chromium: set CHROMIUM to its path")
    path = tmp_path / "page.html"
    path.write_text(render_page(read_runs([str(finished[0]), str(evil)])))
    with open_browser(browser, tmp_path / "profile") as page:
        page.open(path, "document.querySelectorAll('.u-over').length >= 6")
        assert page.evaluate("document.title").startswith("Report: finished")
        markers = "[...document.querySelector('.u-legend').querySelectorAll('.u-marker')].map(m => m.style.borderStyle)"
        assert page.evaluate(markers) == ["", "solid", "dashed"]  # steps, training loss, validation loss
        legends = "[...document.querySelectorAll('.u-legend')].map(legend => legend.innerText)"
        loss = read_run(finished[0]).columns["loss"][-1]
        assert f"training loss{loss:.5g}" in page.evaluate(legends)[0]  # without a mouse, of the last step
        chart = "document.querySelector('.u-over')"
        page.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")  # the mouse moves in what the window shows
        page.redraw()
        x, y, width, height = page.evaluate(f"(r => [r.x, r.y, r.width, r.height])({chart}.getBoundingClientRect())")

        def steps_at(share: float) -> int:
            page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + share * width, y=y + height / 2)
            page.redraw()
            return int(page.evaluate("document.querySelector('.u-legend .u-value').innerText"))

        assert (steps_at(0.01), steps_at(0.99)) == (1, 12)
        page.drag(*((x + share * width, y + height / 2) for share in (0.4, 0.5, 0.7)))
        assert steps_at(0.01) > 4 and steps_at(0.99) < 11
        page.evaluate("axis.value = 1; axis.dispatchEvent(new Event('change'))")
        assert page.evaluate("document.querySelector('.u-legend .u-label').innerText") == "tokens"
        page.call("Emulation.setDeviceMetricsOverride", width=400, height=900, deviceScaleFactor=1, mobile=False)
        page.redraw()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert page.evaluate("document.title").startswith("Report: finished")


# What is drawn in each chart: texts with their left and right edge and whether they are rotated; heights of bars.
RECORD = """
const {fillText, moveTo, lineTo} = CanvasRenderingContext2D.prototype;
window.drawn = {};
const of = canvas => drawn[canvas.closest(".chart")?.querySelector("h3").innerText] ??= {texts: [], bars: []};
Object.assign(CanvasRenderingContext2D.prototype, {
  fillText(text, x, y) {
    const place = this.getTransform(), at = place.transformPoint({x, y}).x, size = this.measureText(text);
    const [left, right] = place.b ? ["Ascent", "Descent"] : ["Left", "Right"];
    const edges = [at - size["actualBoundingBox" + left], at + size["actualBoundingBox" + right]];
    of(this.canvas).texts.push([text, ...edges, place.b != 0]);
    return fillText.apply(this, arguments);
  },
  moveTo(x, y) { this.start = y; return moveTo.apply(this, arguments); },
  lineTo(x, y) { of(this.canvas).bars.push(Math.abs(y - this.start)); return lineTo.apply(this, arguments); },
});
"""


def test_ticks_differ_and_standard_errors_are_drawn(tmp_path):
    """Small changes have long labels, which the title of the axis must not lie on; steps are whole numbers."""
    if (browser := find_browser()) is None:
        pytest.skip("no Chromium: set CHROMIUM to its path")
    rows = ["1,10,1,8.24343,0.5,0.25", "2,20,2,8.24341,0.5,", "3,30,9000,8.2434,0.75,0.125"]
    header = "step,tokens,seconds,val_bpb,val_exact_match,val_exact_match_stderr"
    run = write_run(tmp_path / "run", "\n".join(rows) + "\n", header)
    path = tmp_path / "page.html"
    path.write_text(render_page(read_runs([str(run)])))
    with open_browser(browser, tmp_path / "profile") as page:
        page.call("Page.enable")
        page.call("Page.addScriptToEvaluateOnNewDocument", source=RECORD)
        page.open(path, "document.querySelectorAll('.u-over').length == 2")

        def draw(axis: int) -> dict:
            page.evaluate(f"drawn = {{}}; axis.value = {axis}; axis.dispatchEvent(new Event('change'))")
            page.redraw()
            return page.evaluate("drawn")

        drawn = draw(0)
        texts = [text for text, *_ in drawn["Exact match"]["texts"]]
        assert texts[:4] == ["steps", "1", "2", "3"]
        (title,) = [text for text in drawn["Validation loss per byte"]["texts"] if text[3]]
        labels = [text for text in drawn["Validation loss per byte"]["texts"] if text[0].startswith("8.")]
        assert len({text for text, *_ in labels}) == len(labels) > 2
        assert title[2] < min(left for _, left, *_ in labels)
        assert "0.75 ± 0.125" in page.evaluate("document.querySelector('.u-legend').innerText")
        high, low = drawn["Exact match"]["bars"][-2:]  # the axes have bars, too
        assert high == pytest.approx(2 * low) and low > 0
        assert draw(2)["Exact match"]["texts"][0][0] == "hours of training"


def test_several_runs_as_words_or_with_commas(tmp_path, monkeypatch, capsys):
    a, b, comma = (str(write_run(tmp_path / name, seed=seed)) for seed, name in enumerate(("a", "b", "c,d"), 1))
    monkeypatch.chdir(tmp_path)
    for words in ([a, b], [f"{a},{b}"], ["--run_dirs", a, b], ["--run_dirs", f"{a},{b}", a]):
        assert main(["report", *words, "--format", "md"]) == 0
        assert "| seed | 42 | 1 | 2 |" in capsys.readouterr().out, words
    assert main(["report", comma]) == 0 and "1 run," in capsys.readouterr().out
    for words in (["--out_path", "both.html"], ["--out_path", "both.md", "--format", "md"]):
        assert [main(["report", a, b, *words]) for _ in range(2)] == [0, 0] and Path(words[1]).exists()
    Path("report.html").write_text("mine")
    assert main(["report", a, b]) == 2 and Path("report.html").read_text() == "mine"
    assert "report: --out_path report.html: is a file, and not a report; remove it or" in capsys.readouterr().err


def test_bad_input_is_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    checkpoint = write_run(tmp_path / "run") / "final"
    write_checkpoint(checkpoint, lambda tmp: (tmp / "model_config.yaml").touch())
    cases = {"none": "no such folder", "empty": "is no run", "file": "is a file", "run/final": "is no run"}
    for name, message in cases.items():
        assert main(["report", str(tmp_path / name)]) == 2
        shown = capsys.readouterr().err
        assert message in shown and shown.count("\n") == 1, name


@pytest.mark.parametrize(
    ("header", "rows", "values", "note"),
    [
        ("step,tokens,loss", "1,10,4\nfoo,bar,baz\n2,20,nan\n3,30,\n4,40,2\n5,50", [4, 2], "2 rows of"),
        ("step,tokens,loss", "1,10,4x\n2,20,inf\n3,30,3\n,40,1\n-1,50,1\n", [3], "3 rows of"),
        ("step,tokens,loss", "1,10\n99,3,30,3\n2,20,5\n", [5], "2 rows of"),
        ("step,tokens,loss", "", [], "no rows with a column step"),
        ("epoch,loss", "1,4\n", [], "no rows with a column step"),
        ("loss,new,step", "4,,2\n5,,1\n", [5, 4], "no column tokens"),
        ("step,loss", "\0\xff\n1,4", [4], "1 rows of"),
    ],
)
def test_damaged_metrics_become_a_note(tmp_path, capsys, header, rows, values, note):
    run = write_run(tmp_path / "run", rows, header)
    assert main(["report", str(run), "--format", "md"]) == 0 and note in capsys.readouterr().out
    loss = read_run(run).columns.get("loss", [])
    assert [value for value in loss if abs(value) < 1e300] == values
    assert main(["report", str(run)]) == 0


def test_damaged_events_are_skipped(tmp_path):
    run = write_run(tmp_path / "run")
    with open(run / "logs" / "events.jsonl", "ab") as file:
        file.write(b'[1]\n{"kind": 3}\n\xff\n{"kind": "sam')  # a kill
    write_event(run, "sample", step=1, prompt="a", text="b")
    assert [event["kind"] for event in parse_events((run / "logs/events.jsonl").read_bytes())] == ["launch", "sample"]
    assert read_run(run).samples[0]["text"] == "b"
    write_event(run / "logs" / "metrics.csv", "end")  # no folder: training goes on
    write_event(run, "launch", settings="none", environment=3, time="never", parameters="many")
    assert "not recorded" in read_run(run).notes[0] and render_page(read_runs([str(run)]))


def test_a_plot_that_fails_is_named_and_the_report_is_written(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr(page, "plot_loss", lambda run, path: run["none"])
    assert write_report(run, "finished") == "loss.png was not written: 'RunFacts' object is not subscriptable"
    assert (run / "report.html").exists()


def test_status_of_running_killed_failed_and_resumed_runs(tmp_path):
    run = write_run(tmp_path / "run")
    with exclusive_lock(run):
        assert read_run(run).status == "running"
        assert write_report(run, "stopped: SIGTERM") is None
    assert "Stopped: SIGTERM at step 2, started on 20" in (run / "report.html").read_text()
    assert read_run(run).status == "stopped"
    write_event(run, "end", error="disk full")
    assert read_run(run).status == "stopped: disk full"
    write_event(run, "launch")
    assert read_run(run).status == "stopped"
    write_checkpoint(run / "final", lambda tmp: (tmp / "lit_model.pth").touch())
    assert read_run(run).status == "finished"


def test_runs_with_different_axes_are_drawn_with_a_note(tmp_path):
    a = write_run(tmp_path / "a", "1,2\n2,3\n", "step,loss")
    b = write_run(tmp_path / "b")
    page = render_page(read_runs([str(a), str(b)]))
    assert "a: metrics.csv has no column tokens" in page and "b: metrics.csv" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert [lines["loss"]["raw"] for lines in data["lines"]] == [
        [[1, 2], [None, None], [None, None], [2, 3]],
        [[1, 2], [10, 20], [None, None], [4, 3]],
    ]


def test_command_repeats_the_run(tmp_path):
    words = ["pico-llama", "--train.max_steps", "7", "--optimizer.betas", "[0.8, 0.9]", "--out_dir", "a b"]
    words += ["--data", "TextFiles", "--data.train_data_path", "it's", "--eval.interval", "0"]

    def resolved(words: list[str]) -> dict:
        args = run_args(**parse("pretrain", words))
        return json.loads(json.dumps(hyperparameters(args.requested), default=str))

    run = read_run(write_run(tmp_path / "run", **resolved(words)))
    pasted = words_of(run.command)
    assert pasted[:3] == ["toolkit", "pretrain", "pico-llama"] and not run.notes
    expected = resolved(words)
    assert resolved(pasted[2:]) == expected | {"out_dir": "a b-repeated"}  # a used one is refused
    assert set(run.changed) == {"model_name", *(word[2:] for word in words if word.startswith("--"))}


def words_of(command: str) -> list[str]:
    """Return the words that bash reads."""
    words = ["bash", "-c", f"printf '%s\\0' {command}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]


def test_command_of_a_strangers_run_runs_no_code(tmp_path, monkeypatch):
    """Names, values and classes of its settings are text that a stranger may have written."""
    (tmp_path / "evil_module.py").write_text("import pathlib; pathlib.Path('PWNED').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    word = '"; touch PWNED; echo $(touch PWNED) `touch PWNED`\ntouch PWNED #'
    settings = {
        word: 1, "help": True, "config": "evil.yaml", "model_name": "--help", "extensions": 5, "seed": word,
        "data": {"class_path": "evil_module.Data", "init_args": {"path": "x", word: 2}},
        "train": {"max_steps": "-1", "; touch PWNED": 1},
    }  # fmt: skip
    run = read_run(write_run(tmp_path / "run", **settings))
    command = run.command.replace("toolkit pretrain", "printf '%s\\0'")
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert shown.stdout.split("\0")[:-1] == words_of(run.command)[2:]
    assert {"--extensions", "5", "--model_name=--help", "--train.max_steps=-1"} < {*words_of(run.command)}
    assert not any(name in run.command for name in ("help true", "evil.yaml", "data.;", "train.;"))
    assert "no options: " in run.notes[-1] and "help, config, " in run.notes[-1]
    assert not (tmp_path / "PWNED").exists()


def test_every_text_of_a_strangers_run_can_be_encoded_and_printed(tmp_path, capsys, monkeypatch):
    """Lone surrogates, control sequences, and a folder's name that is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"run-\xff\x1b[31m")
    text = "\ud800 \x1b[2J \x9b31m"
    write_run(folder, model_name=text, out_dir=text, train={text: text, "max_steps": text}, **{text: text})
    for kind in ("warning", "sample", "launch"):
        write_event(folder, kind, text=text, prompt=text, step=text, environment={text: text}, devices=text, model=text)
    write_event(folder, "launch", settings={text: text, "model_name": text}, error=text)
    monkeypatch.chdir(folder)
    assert main(["report", "."]) == 0 and main(["report", ".", "--format", "md"]) == 0
    page = (folder / "report.html").read_text().partition("<main>")[2].partition("<script")[0]
    shown = capsys.readouterr().out + page
    assert shown.count("\\ud800") > 10 and all(c.isprintable() or c == "\n" for c in shown)


def test_files_of_a_run_are_read_to_a_limit_and_not_through_links(tmp_path, monkeypatch):
    """30 GB without blocks on the disk, in any file that a report or a resumed run reads."""

    def check(name: str) -> None:
        run = write_run(tmp_path / name.replace("/", "-"))
        write_checkpoint(run / "final", lambda tmp: (tmp / "hyperparameters.yaml").write_text("{}"))
        for size, reason in ((30 * 2**30, "larger than 1,000,000 bytes"), (0, "symbolic links")):
            (run / name).unlink()
            (run / name).symlink_to("/dev/null") if size == 0 else (run / name).touch()
            if size:
                os.truncate(run / name, size)
            if name.endswith(".yaml"):  # only read without events
                (run / "logs" / "events.jsonl").unlink(missing_ok=True)
            notes = read_run(run).notes
            assert any(f"{name} cannot be read: " in note and reason in note for note in notes), notes
        if name.endswith(".csv"):
            with pytest.raises(UserError, match=r"metrics\.csv: is a symbolic link, which is not followed"):
                MetricsCSV(run / name, resume_step=1)
            (run / name).unlink(), (run / name).write_bytes(bytes(1_000_001))
            with pytest.raises(UserError, match=r"logs: metrics\.csv: larger than .*; move the file away and resume"):
                MetricsCSV(run / name, resume_step=1)

    monkeypatch.setitem(MAX_BYTES, "log", 1_000_000)
    check_each(check, ["logs/metrics.csv", "logs/events.jsonl", "final/hyperparameters.yaml"])


def test_a_link_in_the_folder_of_a_run_is_not_written_through(tmp_path):
    target, run = tmp_path / "diary", tmp_path / "run"
    target.write_text("years of work")
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "events.jsonl").symlink_to(target)
    write_event(run, "launch")
    assert target.read_text() == "years of work"


def test_metrics_with_too_many_columns_have_no_curves(tmp_path):
    run = write_run(tmp_path / "run", "1," + "2," * 300_000 + "3\n", "step," + "a," * 300_000 + "b")
    started = time.process_time()
    assert "more than 1,000 columns: no curves" in read_run(run).notes[0] and render_page(read_runs([str(run)]))
    assert time.process_time() - started < 5


def test_labels_are_words_with_units(tmp_path):
    columns = [
        "tokens_per_sec",
        "peak_memory_gb",
        "val_bpb",
        "grad_norm",
        "mfu",
        "step_s",
        "loss",
        "val_loss",
        "my_gain",
    ]
    run = write_run(tmp_path / "run", ",".join("1" * (len(columns) + 1)) + "\n", ",".join(["step", *columns]))
    data = json.loads(re.search(r'id="data">(.*?)</script>', render_page(read_runs([str(run)])))[1])
    labels = ["tokens/s", "peak memory, GB", "validation bits per byte", "gradient norm", "MFU", "step, s"]
    assert data["labels"] == dict(zip(columns, [*labels, "training loss", "validation loss", "my gain"], strict=True))


def test_run_of_an_older_version_or_from_python(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "logs" / "events.jsonl").unlink()
    write_checkpoint(
        run / "final", lambda tmp: (tmp / "hyperparameters.yaml").write_text("{seed: 7, checkpoint_dir: a}")
    )
    facts = read_run(run)
    assert (facts.changed["seed"], facts.command) == ((7, 42), "toolkit finetune_full a \\\n  --seed 7")
    write_event(run, "launch", settings={"seed": 8}, is_repeatable=False)
    assert (read_run(run).settings, read_run(run).command) == ({"seed": 8}, "")


def test_comparison_names_runs_and_settings(tmp_path, capsys):
    a = write_run(tmp_path / "a" / "run", "2,20,1\n1,10,4\n3,30,2\n", "step,tokens,val_loss", seed=42)
    b = write_run(tmp_path / "b" / "run", seed=42, checkpoint_dir="x", train={"global_batch_size": 16}, objective="DPO")
    write_event(a, "launch", settings={"train": {"global_batch_size": 64}, "model_name": "x" * 400})
    assert main(["report", str(a), str(b), "--format", "md"]) == 0
    text = capsys.readouterr().out
    assert "**a/run**" in text and "| train.global\\_batch\\_size |  | 64 | 16 |" in text
    assert f"| model\\_name | null | {'x' * 300}... | pico-llama |" in text
    assert "| validation loss | 2.0000 |" in text and "| lowest validation loss | 1.0000 at step 2 |" in text
    assert "nats per token" in render_page(read_runs([str(a)]))
    assert "nats per token" not in render_page(read_runs([str(b)]))


def test_display_keeps_notes_and_warnings(capsys, recwarn):
    show = warnings.showwarning
    with make_progress(True) as display:
        warnings.warn("odd", RuntimeWarning, stacklevel=1)
        for line in ("note: a", "warning: b", "saved c"):
            display.message(line)
        assert display.remarks[-3:] == ["RuntimeWarning: odd", "note: a", "warning: b"]
    assert warnings.showwarning is show and len(recwarn) == 1 and "saved c" in capsys.readouterr().out


def test_checkpoints_and_their_checks(tmp_path):
    run = write_run(tmp_path / "run")
    for name in ("step-00000001", "final"):
        write_checkpoint(run / name, lambda tmp: (tmp / "lit_model.pth").write_bytes(b"weights"))
    assert [c.check for c in read_run(run).checkpoints] == ["complete, sizes match"] * 2
    (run / "final" / "lit_model.pth").write_bytes(b"torn")
    (run / "step-00000001" / "COMPLETE").write_text("{")
    checks = {c.name: c.check for c in read_run(run).checkpoints}
    assert checks["final"] == "damaged: lit_model.pth" and "not a manifest" in checks["step-00000001"]


def test_checkpoint_that_is_deleted_meanwhile_is_left_out(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    for name in ("step-00000001", "step-00000002"):
        write_checkpoint(run / name, lambda tmp: (tmp / "lit_model.pth").touch())

    def parse_and_delete(*args):
        shutil.rmtree(run / "step-00000001", ignore_errors=True)
        return parse_manifest(*args)

    monkeypatch.setattr("toolkit_report.run.parse_manifest", parse_and_delete)
    assert [c.name for c in read_run(run).checkpoints] == ["step-00000002"]


def test_long_runs_keep_their_spikes_and_stay_small():
    n = 60_000
    lines = [f"{i},{i * 512},{3 + i % 7},0.1,1.5,,{9000 + i % 5}" for i in range(1, n + 1)]
    lines[43_210] = "43211,22124032,77,0.1,1.5,,9000"
    lines[50_000] = "a foreign row, as slow as its block"
    content = "\n".join(["step,tokens,loss,learning_rate,grad_norm,mfu,tokens_per_sec", *lines])
    started = time.process_time()
    columns, n_lost = parse_metrics(content.encode())
    reduced = reduce_lines(columns, 2000)
    assert time.process_time() - started < 5
    assert n_lost == 1 and "mfu" not in columns and len(columns["step"]) == n - 1
    steps, tokens, _, values = reduced["loss"]["raw"]
    assert len(steps) <= 2003 and max(values) == 77 and tokens[values.index(77)] == 22124032
    assert (steps[0], steps[-1]) == (1, n) and len(reduced["loss"]["smooth"][0]) == 1000
    short = reduce_lines({name: column[:50] for name, column in columns.items()}, 2000)["loss"]
    assert short["smooth"][3] == pytest.approx(smooth(short["raw"][3]), rel=1e-5)


@pytest.mark.slow
def test_run_on_s3(tmp_path, monkeypatch, capsys):
    pytest.importorskip("moto")
    from helpers.s3 import BUCKET, serve

    run = write_run(tmp_path / "run")
    write_checkpoint(run / "final", lambda tmp: (tmp / "lit_model.pth").touch())
    monkeypatch.chdir(tmp_path)
    with serve() as server:
        for name, value in server.environ.items():
            monkeypatch.setenv(name, value)
        for path in run.rglob("*"):
            if path.is_file():
                server.client.upload_file(str(path), BUCKET, f"some/{path.relative_to(tmp_path).as_posix()}")
        (facts,) = read_runs([f"s3://{BUCKET}/some/run/"])
        assert main(["report", f"s3://{BUCKET}/some/run"]) == 0 and Path("report.html").exists()
        assert main(["report", f"s3://{BUCKET}/some/none"]) == 2
        for read in (lambda store: store.read("name"), Storage.entries):
            with pytest.raises(StorageError, match="no such bucket .*; create it, or check its name"):
                read(Storage("s3://typo/run", "run_dirs"))
        server.client.delete_object(Bucket=BUCKET, Key="some/run/final/COMPLETE")
        server.client.put_object(Bucket=BUCKET, Key="some/run/.lease.json", Body=b"{}")
        assert read_run(f"s3://{BUCKET}/some/run").status == "running, or killed"
    assert facts.columns["loss"].tolist() == [4.0, 3.0] and facts.settings["model_name"] == "pico-llama"
    assert (facts.name, facts.status, facts.checkpoints[0].check) == ("run", "finished", "complete")
    assert "is no run" in capsys.readouterr().err
