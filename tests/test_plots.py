import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from sample_runs import learning_table, table, write_run

from jaxrl_atari import cli, plots
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.metrics import moving_average
from jaxrl_atari.report.summary import read_run

NAN = np.nan


def texts(svg):
    """The texts of an SVG. matplotlib draws them as outlines and writes each text into a comment."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(svg, parser).getroot()
    return [element.text.strip() for element in root.iter() if element.tag is ElementTree.Comment]


def pixels(png, colour):
    """The number of pixels of a PNG that have a colour, given as #rrggbb."""
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return int((np.abs(imread(png)[..., :3] * 255 - wanted).max(axis=-1) < 1.5).sum())


def checked(paths, stem, directory):
    """Checks that a graph is exactly two files of the right names, and returns them."""
    assert paths == [directory / f"{stem}.png", directory / f"{stem}.svg"]
    assert sorted(path.name for path in directory.iterdir()) == [f"{stem}.png", f"{stem}.svg"]  # no temporary files
    return paths


@pytest.fixture(scope="module")
def qbert(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "qbert_first"
    tables = [learning_table(GAMES["Qbert"], seed, count=200) for seed in range(3)]
    return write_run(run_dir, tables, name="qbert", total_env_steps=10_000_000)


def plot_session(session_dir):
    return plots.plot_session(read_run(session_dir.parent), session_dir)


def plot_trial(run_dir):
    return plots.plot_trial(read_run(run_dir))


def plot_comparison(run_dirs, output):
    return plots.plot_comparison(list(map(read_run, run_dirs)), output)


def test_a_session_graph_shows_every_panel_with_its_unit(qbert):
    png, svg = checked(plot_session(qbert / "session_1"), "session", qbert / "session_1" / "graphs")
    shown = texts(svg)
    for text in (
        "qbert: Qbert, protocol v5, session 1",
        "return_mean (last 100 games)",
        "return_ma (mean of the last 100 log points)",
        "raw return of a full game",
        *("policy loss", "value loss", "policy entropy", "approximate KL", "clip fraction", "speed", "GPU busy"),
        *("nats", "env steps / s", "%", "share of samples", "env steps", "10M", "10,000"),
    ):
        assert text in shown, text
    assert "learning rate" in shown
    assert pixels(png, plots.COLOURS[0]) > 1000


def test_reference_and_random_scores_are_lines_with_labels(qbert):
    _, svg = plot_trial(qbert)
    labels = "\n".join(texts(svg))
    assert "reference (v5)\n15,460" in labels
    assert "random (v5)\n164" in labels


def test_a_reference_far_above_the_data_does_not_flatten_them(tmp_path):
    run_dir = write_run(tmp_path / "run", [table([1.0, 1.5, 2.0, 2.5], [1e4, 2e4, 3e4, 4e4])], game="Breakout")
    labels = "\n".join(texts(plot_trial(run_dir)[1]))
    assert "reference (v5) ↑\n326.47" in labels
    assert "random (v5)\n1.21" in labels
    assert "300" not in labels


def test_a_trial_graph_shows_the_mean_over_sessions_and_the_score(tmp_path):
    tables = [table([1000, 2000, 3000, 4000]), table([2000, 3000, 4000, 5000])]
    run_dir = write_run(tmp_path / "run", tables)
    png, svg = checked(plot_trial(run_dir), "trial", run_dir / "graphs")
    shown = texts(svg)
    assert "trial: Qbert, protocol v5, 2 sessions, score 3,000 ± 500" in shown
    assert "return_mean (last 100 games); band: ± 1 std over sessions" in shown
    assert not any("thin" in text for text in shown)
    assert pixels(png, plots.COLOURS[0]) > 500


def test_references_are_drawn_beside_scores_of_their_protocol_alone(tmp_path):
    for name, protocol in (("a", "machado"), ("b", "v5")):
        write_run(tmp_path / name, [table([100, 200])], protocol=protocol)
    shown = texts(plot_trial(tmp_path / "a")[1])
    assert "trial: Qbert, protocol machado, 1 session, score 150" in shown
    assert not any("reference" in text or "random" in text for text in shown)
    shown = texts(plot_comparison([tmp_path / "a"], tmp_path / "one")[1])
    assert not any("reference" in text or "random" in text for text in shown)
    shown = texts(plot_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both")[1])
    assert any(text.startswith("reference (v5)") for text in shown)
    assert {"a: machado, 1 session, score 150", "b: v5, 1 session, score 150"} <= set(shown)


def test_a_trial_graph_notes_sessions_that_are_behind(tmp_path):
    run_dir = write_run(tmp_path / "run", [table([100, 200]), table([100, 200, 300, 400])])
    assert "env steps (thin: not all sessions have got this far)" in texts(plot_trial(run_dir)[1])


def test_trials_of_one_game_are_compared_in_one_panel(qbert, tmp_path):
    others = [table(np.linspace(200, 9000, 50) + 100 * seed, 2e5 * np.arange(1, 51)) for seed in range(2)]
    other = write_run(tmp_path / "qbert_second", others, game="QbertNoFrameskip-v4")
    png, svg = checked(plot_comparison([qbert, other], tmp_path / "out"), "comparison", tmp_path / "out")
    shown = texts(svg)
    assert shown.count("Qbert") == 1
    assert any(text.startswith("qbert_first: v5, 3 sessions, score ") for text in shown)
    assert any(text.startswith("qbert_second: classic, 2 sessions, score ") for text in shown)
    assert min(pixels(png, colour) for colour in plots.COLOURS[:2]) > 500


def test_each_game_has_a_panel_and_runs_of_one_name_show_their_parents(tmp_path):
    one = write_run(tmp_path / "a" / "run", [table([1, 2])], game="Pong")
    two = write_run(tmp_path / "b" / "run", [table([1, 2])], game="Kaboom")
    shown = texts(plot_comparison([one, two], tmp_path / "out")[1])
    assert "Pong" in shown
    assert "Kaboom" in shown
    assert "a/run: v5, 1 session, score 1.50" in shown
    assert "b/run: v5, 1 session, score 1.50" in shown


def test_more_trials_than_colours_differ_in_line_style(tmp_path, monkeypatch):
    count = len(plots.COLOURS) + 1
    runs = [write_run(tmp_path / f"run_{i}", [table([100 * i, 200])]) for i in range(count)]
    (axes,) = drawn(monkeypatch, plot_comparison, runs, tmp_path / "out").axes
    curves = [line for line in axes.lines if str(line.get_label()).startswith("run_")]
    assert len(curves) == count
    assert len({(line.get_color(), line.get_linestyle()) for line in curves}) == count


@pytest.mark.parametrize(
    ("returns", "game"), [([NAN], "Qbert"), ([5.0], "Kaboom"), ([NAN, NAN], "Kaboom"), ([NAN, 5.0], "Qbert")]
)
def test_the_first_log_points_can_be_drawn(tmp_path, returns, game):
    run_dir = write_run(tmp_path / "run", [table(returns), table(returns)], game=game)
    plot_session(run_dir / "session_0")
    shown = texts(plot_trial(run_dir)[1])
    assert ("no finished game yet" in shown) == bool(np.isnan(returns[-1]))


def test_graphs_of_the_same_run_are_the_same(tmp_path):
    run_dir = write_run(tmp_path / "run", [table([1, 2, 3])])
    first = [path.read_bytes() for path in plot_trial(run_dir)]
    assert plot_trial(run_dir)[0].read_bytes() == first[0]
    assert b"<dc:date>" not in first[1]  # SVGs differ only in matplotlib's random ids


def test_drawing_uses_no_pyplot_no_global_state_and_no_jax(qbert):
    code = (
        "import sys, matplotlib\n"
        "before = matplotlib.rcParams.copy()\n"
        "from jaxrl_atari.plots import plot_trial, read_run\n"
        "plot_trial(read_run(sys.argv[1]))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert dict.__eq__(matplotlib.rcParams, before)\n"
        "assert 'jax' not in sys.modules\n"  # plots start fast and never use a GPU
    )
    subprocess.run([sys.executable, "-c", code, str(qbert)], check=True, cwd=Path(plots.__file__).parents[1])


def test_the_command_draws_everything_and_prints_the_files(tmp_path, capsys):
    runs = [write_run(tmp_path / name, [table([100, 200])]) for name in ("one", "two")]
    plots.main([*map(str, runs), "--output", str(tmp_path / "out")])
    printed = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(printed) == 2 * (2 + 2) + 2
    assert all(path.is_file() for path in printed)
    assert {path.relative_to(tmp_path).parts[:2] for path in printed} >= {("one", "session_0"), ("two", "graphs")}


def test_the_command_prints_the_probability_of_improvement_of_trials_of_one_game(tmp_path, capsys, caplog, monkeypatch):
    for name in ("plot_session", "plot_trial", "plot_comparison"):
        monkeypatch.setattr(plots, name, lambda *arguments: [])

    def run(name, scores, game="Qbert", budget=100, **options):
        return write_run(tmp_path / name, [table([score]) for score in scores], game, total_env_steps=budget, **options)

    first, second, longer = run("one", [3, 2]), run("two", [1, 2]), run("three", [1, 2], budget=101)
    others = run("pong", [1, 2], "Pong"), run("classic", [9, 8], protocol="classic")
    unscored, begun = run("unscored", [np.nan, 1]), run("begun", [1, 2], budget=400)
    runs = unscored, begun, first, second, *others, longer
    plots.main([*map(str, runs), "--output", str(tmp_path / "out")])
    shown = capsys.readouterr()
    *lines, no_score, not_complete = [
        line for line in (shown.out + shown.err + caplog.text).splitlines() if "probability" in line
    ]
    assert f"{unscored}: a session has no score; no probability of improvement is given for it" in no_score
    assert f"{begun}: not complete; no probability of improvement is given for it" in not_complete
    assert lines == [
        f"Qbert: probability of improvement of {first} over {second}: 0.875 (0.500 to 1.000)",
        f"Qbert: probability of improvement of {first} over {longer}: 0.875 (0.500 to 1.000); "
        "the budgets differ: 100 and 101 env steps",
    ]


def test_names_are_neither_formulas_nor_hidden(tmp_path):
    runs = [write_run(tmp_path / name, [table([1, 2])], name="lr_$lr_$ent") for name in ("lr$^$", "_old")]
    plots.main([*map(str, runs), "--output", str(tmp_path / "out")])
    shown = "\n".join(texts(tmp_path / "out" / "comparison.svg"))
    assert "lr$^$: v5" in shown
    assert "_old: v5" in shown
    assert "lr_$lr_$ent" in "\n".join(texts(runs[0] / "graphs" / "trial.svg"))


def test_what_can_be_drawn_is_drawn_and_what_is_left_out_is_named(tmp_path, capsys, caplog):
    runs = [write_run(tmp_path / name, [table([100, 200])]) for name in ("one", "half", "locked")]
    (runs[1] / "session_0" / "metrics.csv").unlink()
    (runs[2] / "graphs").write_text("")  # a folder that cannot be written to
    with pytest.raises(UserError, match="drew 1 of 3 runs; the warnings above say why"):
        plots.main([*map(str, runs), "--output", str(tmp_path / "out")])
    assert (runs[0] / "graphs" / "trial.png").is_file()
    shown = "\n".join(texts(tmp_path / "out" / "comparison.svg"))
    assert ("one: v5" in shown, "half" in shown, "locked: v5" in shown) == (True, False, True)
    assert f"left out: {runs[1]}/session_0/metrics.csv: cannot be read" in caplog.text
    assert f"left out: {runs[2]}/graphs: cannot write graphs there" in caplog.text
    with pytest.raises(UserError, match="1 of 2 runs"):
        plots.main([str(runs[0]), str(runs[1]), "--output", str(tmp_path / "alone")])
    assert not (tmp_path / "alone").exists(), "one run is no comparison"


def test_one_run_makes_no_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", [table([100, 200])])
    plots.main(["one"])
    assert not (tmp_path / "graphs").exists()
    assert "one/graphs/trial.png" in capsys.readouterr().out.splitlines()  # the path as given


def test_a_run_given_as_a_dot_has_its_name(tmp_path, monkeypatch):
    run, other = (write_run(tmp_path / name, [table([100, 200])]) for name in ("one", "two"))
    monkeypatch.chdir(run)
    _, drawing = plot_comparison([".", other], tmp_path / "out")
    assert "one: v5" in drawing.read_text()


def test_a_running_run_is_drawn(tmp_path, caplog, capsys):
    run_dir = write_run(tmp_path / "run", [table([100, 200, 300]), table([100, 200, 300])])
    path = run_dir / "session_0" / "metrics.csv"
    path.write_text(path.read_text()[:-30])
    (run_dir / "session_1" / "metrics.csv").unlink()
    plots.main([str(run_dir)])
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert "cut short" in caplog.text
    assert "left out" in caplog.text


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: None, "not a run directory"),
        (lambda run: run.mkdir(), "it has no config.json"),
        (lambda run: (run.mkdir(), (run / "config.json").write_text('{"config": {"na')), "damaged (JSONDecodeError"),
        (
            lambda run: (write_run(run, [table([1])]) / "session_0" / "metrics.csv").write_text("env"),
            "no log point yet",
        ),
        (
            lambda run: (write_run(run, [table([1])]) / "session_0" / "metrics.csv").write_text("a\n1\n"),
            "has no column",
        ),
        (lambda run: (write_run(run, [table([1])]) / "graphs").write_text(""), "cannot write graphs"),
    ],
)
def test_a_bad_run_directory_is_a_one_line_error_with_status_2(tmp_path, capsys, damage, message):
    damage(tmp_path / "bad")
    with pytest.raises(SystemExit) as stop:
        cli.run(lambda: plots.main([str(tmp_path / "bad")]))
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_without_a_gpu_no_panel_is_empty(tmp_path):
    columns = learning_table(GAMES["Pong"], 0, count=20, gpu=False)
    columns["gpu_busy_percent"] = np.full(20, NAN)  # the monitor writes NaN
    run_dir = write_run(tmp_path / "run", [columns], game="Pong")
    shown = texts(plot_session(run_dir / "session_0")[1])
    assert "GPU busy" not in shown
    assert "learning rate" in shown


def drawn(monkeypatch, draw, *arguments):
    """The figure that a function saves."""
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, *_: figures.append(figure))
    draw(*arguments)
    return figures[0]


def lines(axes):
    return {line.get_label(): line.get_ydata(orig=False).tolist() for line in axes.lines}


def band(axes):
    """The lowest and the highest value of the only band."""
    (shape,) = axes.collections
    return shape.get_paths()[0].vertices[:, 1].min(), shape.get_paths()[0].vertices[:, 1].max()


def test_a_trial_graph_draws_means_over_sessions_and_a_band_of_one_std(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", [table([1000, 2000, 3000]), table([2000, 4000, 6000])])
    axes = drawn(monkeypatch, plot_trial, run_dir).axes[0]
    shown = lines(axes)
    assert shown[plots.RETURN_MEAN + "; band: ± 1 std over sessions"] == [1500, 3000, 4500]
    assert shown[plots.RETURN_MA] == [1500, 2250, 3000]
    assert band(axes) == (1000, 6000)  # 1500 - 500, 4500 + 1500


def test_a_session_graph_draws_log_points_and_their_moving_average(tmp_path, monkeypatch):
    noise = np.random.default_rng(0).normal(size=50)
    session = table(np.arange(50.0), policy_loss=noise, learning_rate=noise)
    run_dir = write_run(tmp_path / "run", [session])
    first, *small = drawn(monkeypatch, plot_session, run_dir / "session_0").axes
    assert lines(first)[plots.RETURN_MEAN] == session["return_mean"].tolist()
    assert lines(first)[plots.RETURN_MA] == session["return_ma"].tolist()
    panels = {axes.get_title(): [line.get_ydata(orig=False) for line in axes.lines] for axes in small}
    points, average = panels["policy loss"]
    np.testing.assert_array_equal(points, noise)
    np.testing.assert_allclose(average, moving_average(noise, plots.SMOOTHING))


def test_a_session_graph_shows_evaluations_during_training(tmp_path, monkeypatch):
    run_dir = write_run(tmp_path / "run", [table([1.0, 2.0, 3.0])])
    rows = "env_steps,episodes,mean,std\n10000,16,1.5,0.5\n20000,16,4,1\ndamaged\n"
    (run_dir / "session_0" / "evaluations.csv").write_text(rows)
    axes = drawn(monkeypatch, plot_session, run_dir / "session_0").axes[0]
    (points,) = axes.containers
    assert points.get_label() == plots.EVALUATIONS
    assert points[0].get_xydata().tolist() == [[10000, 1.5], [20000, 4]]
    (bars,) = (bar.get_segments() for bar in points[2])
    assert [bar[:, 1].tolist() for bar in bars] == [[1, 2], [3, 5]]


def test_a_comparison_draws_the_mean_return_ma(tmp_path, monkeypatch):
    runs = [write_run(tmp_path / name, [table([k, 3 * k]), table([3 * k, 5 * k])]) for name, k in (("a", 1), ("b", 9))]
    axes = drawn(monkeypatch, plot_comparison, runs, tmp_path / "out").axes[0]
    shown = {label.partition(":")[0]: y for label, y in lines(axes).items()}
    assert (shown["a"], shown["b"]) == ([2, 3], [18, 27])  # return_ma is k, 2 k and 3 k, 4 k
