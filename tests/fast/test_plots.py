"""Graphs: what their files show, read from the SVG's texts and from the lines that are drawn."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from sample_runs import short, table, write_run, write_search

import jaxrl_atari.report.__main__ as report
from jaxrl_atari import plots
from jaxrl_atari.errors import UserError
from jaxrl_atari.report import graphs
from jaxrl_atari.report.searches import plot_search
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.files import read_json, write_json

NAN = np.nan


def texts(svg):
    """The texts of an SVG. matplotlib draws them as outlines and writes each text into a comment."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(svg, parser).getroot()
    return [element.text.strip() for element in root.iter() if element.tag is ElementTree.Comment]


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, in order."""
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k))[1])
    return saved


def lines(axes):
    return {line.get_label(): line.get_ydata(orig=False).tolist() for line in axes.lines}


def test_runs_with_different_seeds_are_one_trial(tmp_path, capsys):
    for seed in (3, 7):
        run_dir = write_run(tmp_path / f"seed_{seed}", [short(1.0, float(seed))])
        config = read_json(run_dir / "config.json")
        config["config"] |= {"seed": seed, "name": f"seed_{seed}"}
        write_json(run_dir / "config.json", config)
    both = [str(tmp_path / "seed_3"), str(tmp_path / "seed_7"), "--merge", str(tmp_path / "both")]
    plots.main(both)
    shown = capsys.readouterr().out
    assert "2 sessions: 2 and 4" in shown
    assert "seed_3/session_0" in shown
    assert (tmp_path / "both" / "graphs" / "trial.svg").is_file()
    plots.main([*both, "--column", "return_mean", "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "return_mean.svg").is_file()
    report.main(both)
    page = (tmp_path / "both" / "report.html").read_text()
    assert "seeds 3, 7" in page
    with pytest.raises(UserError, match="seed_3/session_0: seed = 3: expected a seed that no other session"):
        plots.main([both[0], *both])
    config["config"]["ppo"]["gamma"] = 0.9
    write_json(run_dir / "config.json", config)
    with pytest.raises(UserError, match=r"seed_7: ppo.gamma = 0.9: expected 0.99, as in "):
        plots.main(both)


def test_a_session_graph_draws_log_points_and_evaluations(tmp_path, figures):
    noise = np.random.default_rng(0).normal(size=50)
    session = table(np.arange(50.0), policy_loss=noise, gpu_busy_percent=np.full(50, NAN))
    run = read_run(write_run(tmp_path / "run", [session]))
    (session_dir,) = run.tables
    (session_dir / "evaluations.csv").write_text("env_steps,episodes,mean,std\n1000,16,1.5,0.5\n2000,1,4,\n")
    graphs.plot_session(run, session_dir)
    first, *small = figures[0].axes
    shown = lines(first)
    assert shown["return_mean (last 100 games)"] == session["return_mean"].tolist()
    assert first.get_xlim() == (0, 5000)
    (points,) = first.containers
    assert points[0].get_xydata().tolist() == [[1000, 1.5], [2000, 4]]
    panels = {axes.get_title(): [line.get_ydata(orig=False) for line in axes.lines] for axes in small}
    np.testing.assert_allclose(panels["policy_loss"][0], noise)
    assert "gpu_busy_percent" not in panels


def test_a_trial_graph_draws_means_over_sessions_and_a_band_of_one_sample_std(tmp_path, figures):
    run_dir = write_run(tmp_path / "run", [short(1000, 2000, 3000), short(2000, 4000, 6000)])
    graphs.plot_run(read_run(run_dir))
    axes = figures[-1].axes[0]
    shown = lines(axes)
    assert shown["return_mean (last 100 games)"] == [1500, 3000, 4500]
    compared = "compared at 300 env steps, which these 2 sessions have reached"
    label = f"return_ma: 2 sessions, score 3,000 ± 1,414\n{compared}"
    assert shown[label] == [1500, 2250, 3000]
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((1500 - 500 * 2**0.5, 4500 + 1500 * 2**0.5))


def test_a_metric_of_ones_own_has_a_panel_and_any_column_can_be_drawn(tmp_path, figures, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_dir = write_run(tmp_path / "run", [table(np.arange(4.0), curiosity=[1.0, 3.0, 2.0, 5.0])])
    run = read_run(run_dir)
    graphs.plot_session(run, *run.tables)
    (panel,) = (axes for axes in figures[-1].axes if axes.get_title() == "curiosity")
    assert panel.lines[0].get_ydata().tolist() == [1, 3, 2, 5]
    plots.main(["run", "--column", "curiosity"])
    assert lines(figures[-1].axes[0])["run: 1 session, score 1.50"] == [1, 3, 2, 5]
    assert (tmp_path / "graphs" / "curiosity.svg").is_file()
    with pytest.raises(UserError, match="--column = 'nothing': expected one of"):
        plots.main(["run", "--column", "nothing"])


def test_a_reference_far_above_the_data_is_neither_drawn_nor_in_the_legend(tmp_path, figures):
    run_dir = write_run(tmp_path / "run", [short(1.0, 1.5, 2.0, 2.5)], game="Breakout")
    shown = texts(graphs.plot_run(read_run(run_dir))[-1])
    axes = figures[-1].axes[0]
    low, high = axes.get_ylim()
    assert high < 5
    named = [text for text in shown if text.startswith(("SLM Lab", "human", "random play"))]
    assert named == ["random play (v5): 1.21"]
    assert all(np.isfinite(line.get_ydata()).all() for line in axes.lines)
    assert low <= 1.21 <= high


def test_scores_of_different_protocols_are_in_different_panels_with_their_own_references(tmp_path):
    runs = [
        write_run(tmp_path / name, [short(-20, 15)], protocol=name, game="Pong")
        for name in ("machado", "v5", "classic")
    ]
    shown = texts(graphs.plot_comparison([(run.name, read_run(run)) for run in runs], tmp_path)[1])
    panels = [text for text in shown if text.startswith("Pong, protocol")]
    assert panels == ["Pong, protocol classic", "Pong, protocol machado", "Pong, protocol v5"]
    sources = [text.partition(" (")[0] for text in shown if "10M env steps" in text]
    assert sources == ["CleanRL's PPO", "SLM Lab's PPO"]
    assert sum(text.startswith("random play") for text in shown) == 2


def test_a_comparison_draws_the_mean_return_ma(tmp_path, figures):
    runs = [
        write_run(tmp_path / n, [short(k, 3 * k), short(3 * k, 5 * k)], total_env_steps=200)
        for n, k in (("a", 1), ("b", 9))
    ]
    behind = write_run(tmp_path / "c", [short(1, 2), short(1, 4, 4, 7)], total_env_steps=400)
    new = write_run(tmp_path / "d", [short(NAN)])
    graphs.plot_comparison([(run.name, read_run(run)) for run in (*runs, behind, new)], tmp_path / "out")
    axes = figures[0].axes[0]
    shown = lines(axes)
    assert shown["a: 2 sessions, score 3 ± 1.41"] == [2, 3]  # return_ma is k, 2 k and 3 k, 4 k
    assert shown["b: 2 sessions, score 27 ± 12.73"] == [18, 27]
    left_out = "left out: session 0 (unfinished, at 200 of 400 env steps)"
    assert shown[f"c: 1 of 2 sessions, score 4\n{left_out}"] == [1, 2.5, 3, 4]
    assert shown["d: no value yet"] == []


# The command.


def test_the_command_draws_everything_and_prints_the_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / name, [short(100, 200)], name="lr_$lr_$ent")
    plots.main(["a", "b", "--output", "out"])
    printed = capsys.readouterr().out.split()
    assert {"a/session_0/graphs/session.svg", "b/graphs/trial.png", "out/comparison.svg"} <= set(printed)
    assert "a: 1 session, score 150" in texts(tmp_path / "out" / "comparison.svg")
    assert "lr_$lr_$ent" in texts(tmp_path / "a/graphs/trial.svg")
    plots.main(["a", "b", "--labels", "lr$^$", "new", "--title", "A title"])
    shown = texts(tmp_path / "graphs" / "comparison.svg")
    assert {"lr$^$: 1 session, score 150", "new: 1 session, score 150", "A title"} <= set(shown)
    with pytest.raises(UserError, match="--labels = 'a a': expected 2 different names"):
        plots.main(["a", "a"])


def test_directories_of_all_kinds_are_drawn_and_an_empty_one_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [short(100, 200)])
    empty = write_run(tmp_path / "empty", [short(1)])
    (empty / "session_0" / "metrics.csv").unlink()
    write_search(tmp_path / "search")
    capsys.readouterr()  # Optuna's news
    (tmp_path / "train.log").write_text("session 0 ...")
    setting = tmp_path / "sweep" / "ppo.gamma=0.9"
    write_run(setting / "Pong", [short(-20, -10)], game="Pong")
    described = read_json(setting / "Pong" / "config.json") | {"games": ["Pong"]}
    described |= {"settings": ["ppo.gamma=0.9"]}
    for file in (setting / "suite.json", tmp_path / "sweep" / "sweep.json"):
        write_json(file, described | {"vary": {"ppo.gamma": [0.9]}})
    plots.main(["a", "empty", "search", "sweep", "train.log", "--output", "out"])
    printed, errors = capsys.readouterr()
    files = printed.split()
    drawn = {"a/graphs/trial.svg", "search/graphs/curves.svg", "search/graphs/importances.png"}
    assert drawn | {"sweep/graphs/comparison.svg"} <= set(files)
    assert all((tmp_path / file).is_file() for file in files)
    plots.main(["sweep", "--column", "return_mean", "--output", "out"])
    assert (tmp_path / "out" / "return_mean.svg").is_file()
    run, log = errors.splitlines()
    assert run.startswith("not drawn: empty/session_0/metrics.csv: holds no log point")
    assert log == "not drawn: train.log: holds no run, suite, sweep or search"
    with pytest.raises(UserError, match="nowhere: not a run directory"):
        plots.main(["a", "nowhere"])
    with pytest.raises(UserError, match="nothing is drawn: the lines above say why"):
        plots.main(["train.log", "empty"])


# Searches.


def test_the_graphs_of_a_search_have_the_trials_that_asha_stopped_and_those_that_run(tmp_path, figures):
    trials = ((1e-2, None, "RUNNING"), (1e-4, 3.0, "COMPLETE"), (1e-3, 9.0, "PRUNED"), (3e-4, 6.0, "RUNNING"))
    write_search(tmp_path / "search", trials)
    plot_search(tmp_path / "search")
    curves, _, fields, *_ = figures  # each as PNG and SVG
    drawn = [line.get_xydata().tolist() for line in curves.axes[0].lines]
    assert sorted(drawn) == [[[100, 1], [200, 3]], [[100, 2], [200, 6]], [[100, 3], [200, 9]]]
    assert [line.get_label() for line in curves.axes[0].lines] == ["Trial1", "Trial2", "Trial3"], "as in the study"
    points = [point for each in fields.axes[0].collections for point in each.get_offsets().tolist()]
    assert sorted(points) == [[1e-4, 3], [3e-4, 6], [1e-3, 9]]
