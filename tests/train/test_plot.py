"""Pictures of runs: every value is drawn, and what cannot be drawn is refused in one line."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kos.train.tools import plot
from tests.packages import needs

pytestmark = needs("matplotlib")


def _run(folder: Path, steps: int, **more: list[Any]) -> Path:
    folder.mkdir()
    rows = [
        {"step": step, "loss": 5.0 / step, "lr": 0.1 / step, "grad_norm": 2.0 + step, "tokens_per_second": 100.0 * step}
        for step in range(1, steps + 1)
    ]
    for key, values in more.items():
        for row, value in zip(rows, values, strict=False):
            row |= {key: value} if value != "" else {}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def figure(before_call):
    """Draws, and returns the figure."""
    from matplotlib.figure import Figure

    figures = []
    before_call(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))

    def figure(*arguments):
        assert plot.main([*map(str, arguments)]) == 0
        return figures.pop()

    return figure


@pytest.fixture
def drawn(figure):
    """Draws, and returns the lines of each panel, by label."""
    return lambda *arguments: [
        {str(line.get_label()): line.get_data() for line in axes.lines} for axes in figure(*arguments).axes
    ]


def test_a_picture_has_the_values_of_each_run(tmp_path, drawn):
    first = _run(tmp_path / "first", 4, val_loss=["", 3.0, "", 2.5])
    second = _run(tmp_path / "second", 3, loss=[4.0, None, 2.0])
    loss, lr, norm, speed = drawn(first, second)
    assert (first / "plot.png").read_bytes().startswith(b"\x89PNG") and not (second / "plot.png").exists()
    assert loss.keys() == {"first: training", "first: validation", "second: training"}
    np.testing.assert_array_equal(loss["first: training"], ([1, 2, 3, 4], [5.0, 2.5, 5 / 3, 1.25]))
    np.testing.assert_array_equal(loss["first: validation"], ([2, 4], [3.0, 2.5]))
    np.testing.assert_array_equal(loss["second: training"], ([1, 3], [4.0, 2.0]))  # a step without a loss is left out
    for panel, expected in ((lr, [0.1, 0.05, 0.1 / 3]), (norm, [3, 4, 5]), (speed, [100, 200, 300])):
        np.testing.assert_allclose([*panel.values()][1], ([1, 2, 3], expected))


def test_many_steps_are_smoothed(tmp_path, drawn):
    """By a centred moving average over a fiftieth of them; the learning rate is not."""
    noise = np.random.default_rng(0).normal(2, 0.1, 1000)
    panels = drawn(_run(tmp_path / "run", 1000, loss=[*noise]), "-o", tmp_path / "picture.svg")
    assert b"<svg" in (tmp_path / "picture.svg").read_bytes() and not (tmp_path / "run" / "plot.png").exists()
    (_, each), (steps, mean) = panels[0].values()
    np.testing.assert_array_equal(each, noise)
    np.testing.assert_array_equal(steps, np.arange(1, 1001))
    assert mean[500] == pytest.approx(noise[490:511].mean()) and mean[0] == pytest.approx(noise[:11].mean())
    assert [len(panel) for panel in panels] == [2, 1, 2, 2]


def test_many_runs_differ_and_the_legend_covers_none(tmp_path, figure):
    """Twelve runs: each looks different in the legend, which is beside the panels; no step is drawn alone."""
    folders = [_run(tmp_path / f"run-{i}", 100, val_loss=[2.0]) for i in range(12)]
    figure = figure(*folders, "-o", tmp_path / "all.png")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *(folder.name for folder in folders), "training loss", "validation loss"
    ]  # fmt: skip
    looks = [(line.get_color(), line.get_linestyle()) for line in legend.get_lines()[:12]]
    assert len(set(looks)) == 12
    assert [len(axes.lines) for axes in figure.axes] == [24, 12, 12, 12]
    assert [axes.get_yscale() for axes in figure.axes] == ["linear", "linear", "log", "linear"]
    box = legend.get_window_extent()
    assert not any(axes.get_window_extent().overlaps(box) or axes.get_legend() for axes in figure.axes)


def test_runs_of_one_name_are_told_apart(tmp_path):
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    runs = [_run(folder / "tiny", 2) for folder in folders]
    assert [*plot.read_runs(runs)] == ["tiny", str(runs[1])]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "nowhere: expected the folder of a run with metrics.jsonl, got no steps in nowhere"),
        (["empty"], "got no steps in empty/metrics.jsonl"),
        (["run", "-o", "a.pdf"], "a.pdf: expected a picture's name that ends in .png or .svg"),
        (["run", "-o", "nowhere/a.png"], "got no such folder"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(tmp_path, arguments, expected, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    _run(tmp_path / "run", 2)
    assert plot.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kos: error: ") and expected in line


def test_without_matplotlib_it_says_what_installs_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.main([str(_run(tmp_path / "run", 2))]) == 2
    assert "a picture needs matplotlib: " in capsys.readouterr().err


@pytest.mark.parametrize("norm", [None, 0.0])
@pytest.mark.filterwarnings("error")
def test_a_run_without_a_positive_norm_is_drawn(tmp_path, norm, drawn):
    """Whose logarithm there would be none of."""
    drawn(_run(tmp_path / "run", 3, grad_norm=[norm] * 3))
