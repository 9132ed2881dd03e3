import math
import os
import random
import sys

import pytest
from toolkit_report.plot import loss_limits, plot_loss
from toolkit_report.run import RunFacts
from toolkit_report.series import parse_metrics, reduce_lines, smooth
from toolkit_report.text import figures

from toolkit.ui.loggers import MetricsCSV


def loss_curve(n: int) -> list[float]:
    """Return the losses of a typical run."""
    noise = random.Random(1)
    return [2.5 + 6.5 * math.exp(-step / 20) + noise.gauss(0, 0.07) for step in range(n)]


def make_run(tmp_path, losses, validate_every: int = 50) -> RunFacts:
    metrics = MetricsCSV(tmp_path / "metrics.csv", None)
    metrics.write({"step": 0, "tokens": 0, "val_loss": 9.01})
    for step, loss in enumerate(losses, 1):
        row = {"step": step, "tokens": step * 16384, "loss": loss}
        if step % validate_every == 0:
            row |= {"val_loss": loss + 0.1, "val_ppl": math.exp(loss + 0.1), "val_bpb": loss / 2.75}
        metrics.write(row)
    metrics.close()
    return RunFacts("run", str(tmp_path), columns=parse_metrics((tmp_path / "metrics.csv").read_bytes())[0])


@pytest.mark.parametrize("nonfinite", [{}, {16: math.nan, 40: math.inf}, {299: math.nan}])
def test_plot_is_written(tmp_path, nonfinite, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # no window system and no global state are needed
    losses = loss_curve(300)
    for step, loss in nonfinite.items():
        losses[step] = loss
    assert plot_loss(make_run(tmp_path, losses), tmp_path / "loss.png") is True
    picture = (tmp_path / "loss.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    width, height = (int.from_bytes(picture[a : a + 4], "big") for a in (16, 20))
    assert (width, height) == (1200, 675)
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "metrics.csv"]


def test_labels_and_units(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self))
    run = make_run(tmp_path, loss_curve(300))
    plot_loss(run, tmp_path / "loss.png")
    (axes,) = seen[0].axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("tokens", "loss (nats per token)")
    names = ["tokens", "training loss", "validation loss", "perplexity", "bits per byte"]
    assert axes.get_title(loc="left") == ", ".join(f"{name} {figures(run)[name]}" for name in names)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["training, each step", "training, smoothed", "validation"]
    lines = reduce_lines(run.columns, 2000)  # the report's
    for line, points in zip(axes.lines, (*lines["loss"].values(), lines["val_loss"]["raw"]), strict=True):
        assert (list(line.get_xdata()), list(line.get_ydata())) == points[1::2]
    format_tick = axes.xaxis.get_major_formatter()
    assert [format_tick(x) for x in (0, 5e5, 2e6, 2.5e6, 1e7, 200)] == ["0", "500k", "2M", "2.5M", "10M", "200"]


def test_each_step_is_visible_in_short_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    seen = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: seen.append(self.axes[0]))
    for n in (20, 60):
        (tmp_path / str(n)).mkdir()
        run = make_run(tmp_path / str(n), loss_curve(n), validate_every=99)
        run.settings["objective"] = "DPO"
        plot_loss(run, tmp_path / "loss.png")
    short, longer = ([line for line in axes.lines if line.get_label() != "validation"] for axes in seen)
    assert [line.get_label() for line in short] == ["training, each step"]  # the smoothed line would be the same
    assert seen[0].get_ylabel() == "loss"  # of an objective, not nats per token
    assert longer[0].get_zorder() > longer[1].get_zorder() and longer[0].get_marker() == "."


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, math.nan]])
def test_fewer_than_two_losses_write_no_plot(tmp_path, losses):
    assert plot_loss(make_run(tmp_path, losses), tmp_path / "loss.png") is False
    assert not (tmp_path / "loss.png").exists()


def test_two_equal_losses_write_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    low, high = loss_limits([3.0, 3.0], [])
    assert low < 3.0 < high
    assert plot_loss(make_run(tmp_path, [3.0, 3.0]), tmp_path / "loss.png") is True


def test_without_matplotlib_there_is_no_plot(tmp_path, monkeypatch):
    assert plot_loss(RunFacts("run", ""), tmp_path / "loss.png") is False
    run = make_run(tmp_path, loss_curve(10))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot_loss(run, tmp_path / "loss.png") is False
    assert not (tmp_path / "loss.png").exists()


def test_smoothing_removes_noise_and_keeps_the_trend():
    clean = [2.5 + 6.5 * math.exp(-step / 20) for step in range(300)]
    noisy = loss_curve(300)
    smoothed = smooth(noisy)
    assert len(smoothed) == 300 and smoothed[0] == noisy[0]
    rest = range(60, 300)
    rms = [math.sqrt(sum((curve[i] - clean[i]) ** 2 for i in rest) / len(rest)) for curve in (noisy, smoothed)]
    assert rms[1] < rms[0] / 2
    # no large lag at the steep start
    assert max(abs(smoothed[i] - clean[i]) for i in range(60)) < 0.4


def test_smoothing_removes_spikes():
    losses = [2.0] * 200
    losses[100] = losses[101] = 50.0
    assert smooth(losses) == pytest.approx([2.0] * 200)


def test_axis_limits_cut_off_the_first_losses():
    losses = [11.0, 6.0, 4.0] + [2.0 + 0.5 * (100 - i) / 100 for i in range(100)]
    low, high = loss_limits(losses, [2.4])
    assert low < 2.0 and 2.5 < high < 3.5


def test_axis_limits_cut_off_spikes_but_not_validation_losses():
    losses = [2.0 + 0.5 * (300 - i) / 300 for i in range(300)]
    losses[150] = 40.0
    assert loss_limits(losses, [])[1] < 3.5
    assert loss_limits(losses, [5.0])[1] > 5.0


def test_axis_limits_show_a_typical_run_completely():
    losses = loss_curve(300)
    low, high = loss_limits(losses, [])
    assert low < min(losses) and high > max(losses)
