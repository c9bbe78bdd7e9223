"""Reports: what the pages show, that a hostile run stays data, and how a real browser shows them."""

import base64
import dataclasses
import json
import re
from html.parser import HTMLParser
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from browser import chromium
from PIL import Image
from sample_runs import learning_table, table, write_metrics, write_run

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import UserError
from jaxrl_atari.plots import main as plots_command
from jaxrl_atari.report import chart, pages
from jaxrl_atari.report.__main__ import main
from jaxrl_atari.report.pages import try_report, write_report
from jaxrl_atari.report.search_records import Record, write_record
from jaxrl_atari.report.suites import INTERVALS
from jaxrl_atari.report.summary import read_run, trial_summary
from jaxrl_atari.runs.columns import REQUIRED_COLUMNS
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.search import __main__ as search_command
from jaxrl_atari.search.files import read_search, write_search
from jaxrl_atari.search.space import Integer, LogUniform, SearchConfig, set_fields
from jaxrl_atari.suite import __main__ as suite_command
from jaxrl_atari.suite import suite
from jaxrl_atari.suite.results import write_results as write_suite_results
from jaxrl_atari.suite.suite import game_configs, write_suite_file

SOFTWARE = {
    "python": "3.11.2",
    "versions": {"jax": "0.10.2", "ale-py": "0.12.1"},
    "git_revision": "81c3ea4+",
    "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 8.1, "gpus": ["Some GPU"], "driver": "570.1"},
    "resumed": [{"date": "2026-11-22 10:00:00"}],
}
TIMES = {"emulators_percent": [np.nan, 50, 20, 20], "policy_percent": [np.nan, 20, 20, 20],
         "learning_percent": [np.nan, 30, 60, 60]}  # fmt: skip


class Text(HTMLParser):
    """Tags with their attributes, and the text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.parts, self._hidden = [], [], False
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._hidden = tag == "style"

    def handle_endtag(self, tag):
        self._hidden = self._hidden and tag != "style"

    def handle_data(self, data):
        if not self._hidden:
            self.parts.append(data)

    def links(self):
        return [attributes["href"] for tag, attributes in self.tags if tag == "a"]


def describe(run_dir, **values):
    path = run_dir / "config.json"
    write_json(path, json.loads(path.read_text()) | SOFTWARE | values)


def make_run(run_dir, **kwargs):
    """Two complete sessions of Qbert; session 0 scores 2,000, session 1 3,000."""
    tables = [table([500, score, score, score], sps=[np.nan, 100, 200, 300], **TIMES) for score in (2500, 3833)]
    for each, score in zip(tables, (2000, 3000), strict=True):
        each["return_ma"][-1] = score
    write_run(run_dir, tables, **kwargs)
    describe(run_dir)
    return run_dir


def test_the_page_of_a_run_shows_everything(tmp_path):
    run_dir = make_run(tmp_path / "run", name="my_run")
    for step, device in ((100, "cpu:0 (older)"), (400, "cuda:0 (devices.gpu = auto)")):
        meta = run_dir / "session_0" / "checkpoints" / str(step) / "meta"
        meta.mkdir(parents=True)
        write_json(meta / "metadata", {"device": device})
    write_json(run_dir / "evaluation.json", {
        "checkpoint": "latest", "sessions": ["session_0", "session_1"], "greedy": False, "episodes": 2, "mean": 2750.0,
        "interval": [2400.0, 3100.0], "session_means": [2400.0, 3100.0], "matrix": [[2300.0, 2500.0], [3000.0, 3200.0]],
        "env_steps": [300, 400],
    })  # fmt: skip
    (run_dir / "session_1" / "video_400.mp4").write_bytes(b"moving pictures")
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Text(path)
    for part in (
        "Qbert my_run", "protocol v5", "2 sessions", "400 env steps each", "seeds 0 to 1",
        "2,500 return_ma at the end, mean over sessions",  # the score
        "95% interval 2,000 to 3,000",  # two sessions: the bootstrap's range
        "SLM Lab's PPO, 10M env steps 15,460", "human tester 13,455", "random play 164",  # beside references
        "reference-normalised 0.153",  # (2500 - 163.95) / (15460 - 163.95)
        "evaluation 2,750, 95% interval 2,400 to 3,100 (all sessions at env step 300 to 400, 2 full games each)",
        "session 1 3,100 3,000, 3,200",  # the matrix of the evaluation
        "final return_ma 2,500 500 2,000 3,000",  # figures of each session
        "env steps per second 200",
        # The log points end after 36, 72, 108 and 144 s; the first has no shares. (50 + 20 + 20) / 3 = 30.
        "30% waiting for the emulators", "20% policy and the rest of acting", "50% update, log points, checkpoints",
        "6 of 61 options differ", "env.num_envs 2 16",
        "λ of GAE: 0.95 (tuned for this game)",
        "Python 3.11.2", "jax 0.10.2", "git 81c3ea4+", "Some CPU, 2 cores", "8 GiB", "Some GPU", "570.1",
        "resumed 2026-11-22 10:00:00",
        "session 0 cuda:0 (devices.gpu = auto)",
        "session_1/video_400.mp4",
    ):  # fmt: skip
        assert part in page.text, part
    videos = [attributes["src"] for tag, attributes in page.tags if tag == "video"]
    assert [base64.b64decode(src.partition("base64,")[2].partition("#")[0]) for src in videos] == [b"moving pictures"]
    strong = [attributes for tag, attributes in page.tags if tag == "path" and "strong" in attributes["class"]]
    assert len(strong) >= 2 * 8  # inline SVG: two sessions in each chart


def test_the_options_that_differ_are_marked(tmp_path):
    text = write_report(make_run(tmp_path / "run")).read_text()
    marked = re.findall(r'<tr class="changed"><td><code>([\w.]+)</code>', text)
    changed = {"name", "sessions", "total_env_steps", "env.num_envs", "ppo.rollout_length", "ppo.minibatch_size"}
    assert set(marked) == changed


def test_the_rules_that_differ_from_the_protocol_are_marked_and_nothing_is_compared(tmp_path):
    run_dir = make_run(tmp_path / "run")
    values = json.loads((run_dir / "config.json").read_text())
    values["config"]["env"] |= {"protocol": "machado", "noop_max": 1}
    write_json(run_dir / "config.json", values)
    page = Text(write_report(run_dir))
    assert "protocol machado, noop_max=1" in page.text
    assert "not of this protocol (machado, noop_max=1)" in page.text
    assert "env.noop_max 1 0" in page.text
    assert "SLM Lab's PPO" not in page.text
    assert "reference-normalised" not in page.text


def test_one_session_has_no_interval(tmp_path):
    write_run(tmp_path / "run", [table([1.0, 2.0, 3.0, 4.0])])
    assert "95% interval - (one session has none)" in Text(write_report(tmp_path / "run")).text


@pytest.mark.parametrize("returns", [[np.nan], [5.0], [np.nan, np.nan, 7.0]])
@pytest.mark.parametrize("game", ["Qbert", "Turmoil"])
def test_the_first_log_points_make_a_page(tmp_path, returns, game):
    write_run(tmp_path / "run", [table(returns)], game=game)
    text = Text(write_report(tmp_path / "run")).text
    assert f"not complete: mean {100 * len(returns)} of 400 env steps; 1 of 1 sessions has begun" in text
    assert ("No game has ended yet" in text) == bool(np.isnan(returns[-1]))


@pytest.mark.parametrize("columns", [table([1.0]), REQUIRED_COLUMNS])  # no columns of time; no losses either
def test_metrics_of_an_older_version(tmp_path, columns):
    session = table([1.0, 2.0])
    write_run(tmp_path / "run", [{name: session[name] for name in columns}])
    plots_command([str(tmp_path / "run")])
    assert trial_summary(read_run(tmp_path / "run"))["score"] == 1.5
    text = Text(write_report(tmp_path / "run")).text
    assert "Where the time went is not known" in text
    assert "Not recorded" in text


# --- Suites and searches ---------------------------------------------------------------------------------------------


def make_suite(suite_dir):
    """Breakout is complete, Pong has begun, Qbert is waiting."""
    config = Config(name="suite", sessions=2, total_env_steps=2048)
    suite_dir.mkdir(parents=True)
    games = ["Breakout", "Pong", "Qbert"]
    write_suite_file(suite_dir, config, games)
    for game, count, steps in (("Breakout", 2, 2048), ("Pong", 1, 1024)):
        write_json_dir(suite_dir / game, {"config": game_configs(config, games)[game].to_dict()})
        for session in range(count):
            columns = table([1.0, 30.0 + 10 * session], env_steps=[steps / 2, steps])
            write_metrics(suite_dir / game / f"session_{session}", columns)
    write_suite_results(suite_dir)
    return suite_dir


def write_json_dir(directory, values):
    directory.mkdir()
    write_json(directory / "config.json", values)


def test_the_page_of_a_suite_is_a_table_that_links_its_games(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    page = Text(write_report(suite_dir))
    assert set(page.links()) == {"./Breakout/report.html", "./Pong/report.html"}
    for link in page.links():
        assert (suite_dir / link).is_file()
    assert "Breakout 18 15.50 to 20.50 15.50, 20.50 326.47" in page.text  # score, interval, sessions, reference
    assert re.search(r"Pong 15.50 - .* not complete", page.text)
    assert "Qbert - - - - - - - - waiting" in page.text
    assert re.search(r"ratio 1 0\.\d+ \(0\.\d+ to 0\.\d+\)", page.text)  # aggregates of the one complete game
    assert INTERVALS.replace("`", "") in page.text


def test_a_failed_game_is_named_with_its_reason_until_it_is_complete(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    write_suite_results(suite_dir, {"Qbert": "the ROM is missing", "Pong": "x", "Breakout": "since resumed"})
    text = Text(write_report(suite_dir)).text
    assert "failed: the ROM is missing" in text
    assert "failed: x" in text
    assert "failed: since resumed" not in text


def make_search(search_dir):
    """Trial 1 is the best, trial 0 was stopped, trial 2 failed before its first log point."""
    search_dir.mkdir(parents=True)
    space = {"ppo.learning_rate": LogUniform(1e-5, 1e-2), "total_env_steps": Integer(10**6, 10**7)}
    write_search(search_dir, Config(env=EnvConfig(game="Qbert")), SearchConfig(space=space))
    for number, score in ((0, 100.0), (1, 400.0)):
        write_run(search_dir / f"trial_{number}", [table([50.0, score])], total_env_steps=200)
    fields = [{"ppo.learning_rate": rate, "total_env_steps": 2_345_678} for rate in (1e-5, 1e-3, 1e-2)]
    write_record(search_dir, Record(0, fields[0], "stopped", "ASHA", 75.0, 200))
    write_record(search_dir, Record(1, fields[1], "finished", "budget spent", 225.0, 200))
    write_record(search_dir, Record(2, fields[2], "failed", "the loss became nan"))
    return search_dir


def test_the_page_of_a_search_ranks_its_trials_and_links_them(tmp_path):
    search_dir = make_search(tmp_path / "search")
    page = Text(write_report(search_dir))
    assert page.links() == ["./trial_1/report.html", "./trial_0/report.html"]
    assert all((search_dir / link).is_file() for link in page.links())
    assert "Best trial 225 trial 1" in page.text
    best, other = "1 0.001 2345678 225 200 finished budget spent", "0 1e-05 2345678 75 200 stopped ASHA"
    assert f"{best} {other} 2 0.01 2345678 - 0 failed" in page.text
    assert "score against ppo.learning_rate" in page.text
    assert "at most" not in page.text  # the trials' budgets differ
    for number in (0, 1):  # interrupted before a trial had a rank
        write_record(search_dir, Record(number, {"ppo.learning_rate": 1e-5}, "unfinished", "", 75.0 + number, 200))
    text = Text(write_report(search_dir)).text
    assert "Best trial" not in text
    assert "0 1e-05 - 75 200 unfinished" in text  # a record without one of the fields
    config, search = read_search(search_dir)
    write_search(search_dir, config, dataclasses.replace(search, space={}))
    assert "at most 10,000,000 env steps a session" in Text(write_report(search_dir)).text


# --- A run is data ---------------------------------------------------------------------------------------------------

HOSTILE = """"><script>document.title='owned'</script><img src=x onerror=alert(1)>'{{ 7 * 7 }}"""


def make_hostile(tmp_path):
    """A run and a suite whose every text is an attack."""
    run_dir = make_run(tmp_path / "run")
    values = json.loads((run_dir / "config.json").read_text())
    values["config"] |= {"name": HOSTILE.replace("/", "|"), "output_dir": HOSTILE}
    values["config"]["log"] = {"wandb_project": HOSTILE}
    values |= {"python": HOSTILE, "versions": {HOSTILE: HOSTILE}, "git_revision": [HOSTILE]}
    values |= {"hardware": {"cpu": HOSTILE, "gpus": [HOSTILE], "memory_gib": HOSTILE}, "resumed": [{"date": HOSTILE}]}
    write_json(run_dir / "config.json", values)
    suite_dir = make_suite(tmp_path / "suite")
    values = json.loads((suite_dir / "suite.json").read_text())
    write_json(suite_dir / "suite.json", values | {"games": ["Pong", "javascript:alert(1)", HOSTILE, 3]})
    write_json(suite_dir / "results.json", {"games": [{"game": "Pong", "status": f"failed: {HOSTILE}"}]})
    return run_dir, suite_dir


def test_hostile_values_are_shown_and_not_executed(tmp_path):
    for directory in make_hostile(tmp_path):
        path = write_report(directory)
        page = Text(path)
        assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img", "iframe", "object", "base", "form"})
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert "<script>document" in page.text  # as text
        assert "{{ 7 * 7 }}" in page.text
        assert all(link.startswith("./") and link.endswith("/report.html") for link in page.links())


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"games": 3}', '{"games": [1]}', '{"games": [{"game": []}]}', '{"games": [{"status": "x"}]}'],
)
def test_damaged_results_of_a_suite_leave_the_statuses_out(tmp_path, content):
    suite_dir = make_suite(tmp_path / "suite")
    (suite_dir / "results.json").write_text(content)
    assert "Breakout 18" in Text(write_report(suite_dir)).text


@pytest.mark.parametrize("value", ["NaN", "1e999", "1" + "0" * 400])
@pytest.mark.parametrize("name", ["score", "env_steps"])
def test_a_record_with_a_number_that_cannot_be_shown_is_an_error_of_one_line(tmp_path, name, value):
    search_dir = make_search(tmp_path / "search")
    (search_dir / "trial_1" / "record.json").write_text(f'{{"number": 1, "fields": {{}}, "{name}": {value}}}')
    with pytest.raises(UserError, match=rf"trial_1/record\.json: damaged \(ConfigError: {name}") as error:
        write_report(search_dir)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", [None, "x", [1], {"mean": "3"}, {"env_steps": "3"}, {"matrix": [["x"]]}, {"interval": [1]}]
)
def test_a_damaged_evaluation_is_left_out(tmp_path, value):
    run_dir = make_run(tmp_path / "run")
    sound = {"checkpoint": "latest", "sessions": ["session_0", "session_1"], "greedy": False, "episodes": 1,
             "mean": 1.0, "interval": None, "session_means": [1.0, 1.0], "matrix": [[1.0], [1.0]],
             "env_steps": [100, 100]}  # fmt: skip
    write_json(run_dir / "evaluation.json", sound)
    assert "evaluation 1, 95% interval -" in Text(write_report(run_dir)).text
    (run_dir / "evaluation.json").write_text(json.dumps(sound | value if isinstance(value, dict) else value))
    assert "Evaluation of all sessions" not in Text(write_report(run_dir)).text


# --- The command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_page_for_each_directory(tmp_path, capsys):
    directories = [make_run(tmp_path / "run"), make_suite(tmp_path / "suite")]
    main([str(directory) for directory in directories])
    written = [str(directory / "report.html") for directory in directories]
    assert capsys.readouterr().out.splitlines() == written
    with pytest.raises(UserError, match="nowhere: not a run directory"):
        main([str(directories[0]), str(tmp_path / "nowhere"), str(directories[1])])
    assert capsys.readouterr().out.splitlines() == written


def test_what_has_no_report(tmp_path):
    run_dir = make_run(tmp_path / "run")
    (run_dir / "session_0" / "checkpoints").mkdir()
    with pytest.raises(UserError, match=rf"session_0: is a session's directory; expected the run's, {run_dir}"):
        write_report(run_dir / "session_0")
    with pytest.raises(UserError, match=r"none: not a run directory"):
        write_report(tmp_path / "none")
    (run_dir / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html: cannot be written \(Is a directory\)"):
        write_report(run_dir)


@pytest.mark.parametrize("error", [UserError("x: damaged"), OSError(28, "No space left on device"), RuntimeError()])
def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys, error):
    def fail(directory):
        raise error

    monkeypatch.setattr(pages, "write_report", fail)
    try_report(tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no report: ")
    assert line.endswith(f"; python -m jaxrl_atari.report {tmp_path} tries again")


def test_a_suite_and_a_search_write_their_reports_at_the_end(tmp_path, monkeypatch, capsys):
    suite_dir, search_dir = make_suite(tmp_path / "suite"), make_search(tmp_path / "search")
    monkeypatch.setattr(suite, "run_processes", lambda *_, **__: None)
    monkeypatch.setattr(suite_command, "plot", lambda *_: None)
    monkeypatch.setattr("jaxrl_atari.search.results.plot_search", lambda *_: None)
    monkeypatch.setattr(search_command, "load_tune", lambda _: SimpleNamespace(run=lambda *_: True))
    config, options = read_search(search_dir)
    suite_command.main(["--resume", str(suite_dir), "--log.no-graphs"])
    search_command.search(set_fields(config, {"log.graphs": False}), options, search_dir)
    assert not list(tmp_path.rglob("report.html"))  # the report follows log.graphs
    capsys.readouterr()
    suite_command.main(["--resume", str(suite_dir), "--log.graphs"])
    search_command.search(config, options, search_dir)
    lines = capsys.readouterr().out.splitlines()
    assert {str(suite_dir / "report.html"), str(search_dir / "report.html")} <= set(lines)
    assert "./Breakout/report.html" in Text(suite_dir / "report.html").links()
    assert "./trial_1/report.html" in Text(search_dir / "report.html").links()


# --- Charts ----------------------------------------------------------------------------------------------------------


def test_a_line_is_drawn_where_its_points_are():
    drawn = chart.draw("title", [chart.Series([0, 50, 100], [0, 10, 20])])
    assert drawn is not None
    line = next(shape for shape in drawn.shapes if shape.look == "strong")
    points = [tuple(map(int, pair.split())) for pair in line.d[1:].split("L")]
    assert [x for x, _ in points] == [0, 500, 1000]
    low, middle, high = (y for _, y in points)
    assert low > middle > high  # SVG's y points down
    assert low - middle == pytest.approx(middle - high, abs=1)
    ticks = {text: at for at, text in drawn.y_ticks}
    assert ticks["10"] == pytest.approx(middle / 10, abs=0.1)
    assert {"0", "20", "100"} <= {text for _, text in drawn.x_ticks}


def test_gaps_are_not_bridged_and_a_lone_point_is_a_dot():
    drawn = chart.draw("title", [chart.Series([0, 1, 2, 3, 4, 5], [1, 2, np.nan, 3, 4, 5])])
    assert drawn is not None
    assert drawn.shapes[0].d.count("M") == 2
    alone = chart.draw("title", [chart.Series([5.0], [1.0])])
    assert alone is not None
    assert "dots" in [shape.look for shape in alone.shapes]
    many = chart.draw("title", [chart.Series(np.arange(1000) % 2, np.arange(1000.0), look="dots")])
    assert many is not None
    assert set(re.findall(r"M(\d+) ", many.shapes[0].d)) == {"0", "1000"}  # each dot where its point is
    assert chart.draw("title", [chart.Series([1, 2], [np.nan, np.nan])]) is None


def test_a_far_reference_is_left_out_and_a_near_one_enters_the_scale():
    drawn = chart.draw("title", [chart.Series([0, 1], [0, 10])], rules=[(1000.0, "far"), (25.0, "near")])
    assert drawn is not None
    ((at, text),) = drawn.rules
    assert text == "near"
    assert 0 <= at < 20


def test_many_points_become_means_of_neighbours():
    x, y = chart.thin(np.arange(1000), np.where(np.arange(1000) == 3, np.nan, 2.0), 100)
    assert len(x) == len(y) == 100
    assert x[0] == pytest.approx(4.5)
    np.testing.assert_allclose(y, 2.0)


def test_the_scale_has_our_score_first_with_its_interval():
    ours, best, worst = chart.scale([("ours", 50, "50"), ("best", 100, "100"), ("worst", 0, "0")], (25.0, 75.0))
    assert (ours.at, best.at, worst.at) == (50, 98, 2)
    assert ours.interval == (26, 74)
    assert best.interval is None


# --- A real browser --------------------------------------------------------------------------------------------------


def test_pages_in_a_real_browser(tmp_path):
    """Light and dark, narrow and wide: nothing requested, no complaint, no overflow, a picture with content."""
    tables = [learning_table(GAMES["Qbert"], seed, count=200) for seed in range(4)]
    name = "a_" + "very_" * 20 + "long_name"
    learned = write_run(tmp_path / "learned", tables, total_env_steps=10_000_000, name=name)
    describe(learned, git_revision="x" * 200)
    (learned / "session_0" / "video_1.mp4").write_bytes(b"no video")
    hostile, hostile_suite = make_hostile(tmp_path / "hostile")
    directories = [learned, hostile, hostile_suite, make_search(tmp_path / "search")]
    paths = [write_report(directory) for directory in directories]
    with chromium(tmp_path / "profile") as page:
        for path in paths:
            for width, dark in ((400, False), (1280, True), (400, True), (1280, False))[: 4 if path == paths[0] else 2]:
                page.open(path, width, dark=dark)
                where = f"{path.parent.name}, {width} wide, {'dark' if dark else 'light'}"
                assert page.requests == [path.as_uri()], where
                assert page.complaints == [], where
                assert page.evaluate("document.title") != "owned"
                assert page.evaluate("document.documentElement.scrollWidth") <= width, where
                page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
                assert page.evaluate("document.documentElement.scrollWidth") <= width, where
                pixels = np.asarray(Image.open(BytesIO(page.picture())).convert("L"), np.float64)
                assert pixels.shape[1] == width
                assert pixels.std() > 8, where  # text and charts
                assert np.median(pixels) < 60 if dark else np.median(pixels) > 200, where
