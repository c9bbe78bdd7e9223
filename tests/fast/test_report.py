"""Reports: what the pages show, and that a hostile run stays data."""

import base64
import os
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from sample_runs import short, write_run, write_search

from jaxrl_atari.config import Config, EnvConfig, PPOConfig, flat
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.__main__ import main
from jaxrl_atari.report.page import try_report, write_report
from jaxrl_atari.runs.files import read_json, write_json

SOFTWARE = {
    "python": "3.11.2",
    "versions": {"jax": "0.10.2", "ale-py": "0.12.1"},
    "git_revision": "81c3ea4+",
    "hardware": {"cpu": "Some CPU", "memory_gib": 8.1234567, "gpus": ["Some GPU", "Another"], "driver": None},
    "resumed": [{"date": "2026-11-22 10:00:00", "changed": {"total_env_steps": [200, 400]}}],
}


class Page(HTMLParser):
    """Tags with their attributes, and the text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.parts = [], []
        self.feed(re.sub("<style>.*?</style>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
        self.text = " ".join(" ".join(self.parts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.parts.append(data)

    def all(self, tag, attribute):
        return [attributes.get(attribute) for name, attributes in self.tags if name == tag]

    def contents(self, tag):
        return [base64.b64decode(src.partition("base64,")[2].partition("#")[0]) for src in self.all(tag, "src")]


def make_run(run_dir, **kwargs):
    """Three complete sessions of Qbert; they score 2,000, 3,000 and 4,000."""
    tables = [short(500, score, score, score, policy_percent=np.full(4, 25.0)) for score in (2500, 3833, 5167)]
    for each, score in zip(tables, (2000, 3000, 4000), strict=True):
        each["return_ma"][-1] = score
    return write_run(run_dir, tables, **SOFTWARE, **kwargs)


def test_the_page_of_a_run_shows_everything(tmp_path):
    run_dir = make_run(tmp_path / "run", name="my_run")
    meta = run_dir / "session_0" / "checkpoints" / "400" / "meta"
    meta.mkdir(parents=True)
    write_json(meta / "metadata", {"device": "cuda:0 (devices.gpu = auto)"})
    found = {"checkpoint": "latest", "episodes": 32, "greedy": False, "mean": 2750.0}
    write_json(run_dir / "evaluation.json", found | {"session_means": [2400.0, 2750.0, 3100.0], "cut_off": 7})
    one = {"episodes": 3, "greedy": True, "std": 5.0, "returns": [2.0, 4.0, 9.5], "cut_off": 2}
    write_json(run_dir / "session_1" / "evaluation_400.json", found | one)
    verified = {"date": "2026-11-25", "version": "1.0", "rows": 4, "games": 456, "env_steps": 400}
    write_json(run_dir / "session_1" / "verified.json", verified)
    (run_dir / "session_1" / "video_400.mp4").write_bytes(b"moving pictures")
    page = Page(write_report(run_dir))
    for part in (
        "Qbert: my_run protocol v5 3 sessions 400 env steps each seeds 0, 1, 2 λ of GAE 0.95",
        "Score 3,000 this run (v5, 400 env steps, λ 0.95, dialect ",
        "score: return_ma at the end, the mean over the last 40 env steps",
        "95% interval 515.86 to 5,484",  # 3000 ± 4.303 * 1000 / sqrt(3)
        "SLM Lab's PPO (v5, 10M env steps, λ 0.95) 15,460", "human tester (DQN Zoo) "
        "13,455", "random play (v5) 164",
        "(score - random) / (first reference - random) 0.185",
        "session_1 verified 4 of 4 rows, 456 games, on 2026-11-25, version 1.0",
        "time: policy % 25 0 25 25 25",
        "evaluation.json 32 each 2,750 95% interval 1,881 to 3,619 7",
        "session_1/evaluation_400.json 3, greedy 2,750 std 5 2",  # two games were cut off
        f"6 of {len(flat(Config().to_dict()))} options differ", "env.num_envs 2 16",
        "python 3.11.2", "versions.jax 0.10.2", "git_revision 81c3ea4+", "hardware.memory_gib 8.12",
        "hardware.gpus Some GPU, Another", "resumed 2026-11-22 10:00:00 total_env_steps: 200 -> 400",
        "session_0 cuda:0 (devices.gpu = auto)",
        "session_1/video_400.mp4",
    ):  # fmt: skip
        assert part in page.text, part
    assert page.contents("video") == [b"moving pictures"]
    graphs = [run_dir / "graphs" / "trial.svg", *sorted(run_dir.glob("session_*/graphs/session.svg"))]
    assert page.contents("img") == [graph.read_bytes() for graph in graphs]


@pytest.mark.parametrize(("returns", "game"), [([np.nan], "Qbert"), ([np.nan, np.nan, 7.0], "Turmoil")])
def test_the_first_log_points_make_a_page(tmp_path, returns, game):
    write_run(tmp_path / "run", [short(*returns)], game=game)
    text = Page(write_report(tmp_path / "run")).text
    assert "not complete" in text
    assert ("no game has finished" in text) == bool(np.isnan(returns[-1]))
    assert "interval" not in text


# Suites and searches.


def make_suite(suite_dir, protocol="v5"):
    """Breakout is complete, Pong has begun, and Seaquest has not."""
    suite_dir.mkdir(parents=True)
    env, ppo = EnvConfig(protocol=protocol, num_envs=2), PPOConfig(rollout_length=8, minibatch_size=16)
    config = Config(name="suite", sessions=2, total_env_steps=400, env=env, ppo=ppo).to_dict()
    games = ["Breakout", "Pong", "Seaquest"]
    write_json(suite_dir / "suite.json", SOFTWARE | {"games": games, "config": config})
    write_run(suite_dir / "Breakout", [short(1, 30, 30, 30), short(1, 40, 40, 40)], "Breakout", protocol)
    write_run(suite_dir / "Pong", [short(1, 30)], "Pong", protocol)
    return suite_dir


def test_the_page_of_a_suite_is_a_table_that_links_its_games(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    for game in ("Breakout", "Pong"):
        write_report(suite_dir / game)
    page = Page(write_report(suite_dir))
    assert page.all("a", "href") == ["./Breakout/report.html", "./Pong/report.html"]
    assert all((suite_dir / link).is_file() for link in page.all("a", "href"))
    assert "Breakout 0.7 2 400 26.50 5.30 35 326.47 0.0778 0.861 0.04 complete" in page.text
    assert re.search(r"Pong 0.85 1 200 15.50 - .* 16.69 .* 0.02 not complete", page.text)
    assert re.search(r"Seaquest - 0 .* not complete", page.text)
    assert re.search(r"ratio 1 0\.0778 \(-0\.0\d+ to 0\.2\d+\)", page.text)  # statistics of the one complete game
    assert page.contents("img") == [(suite_dir / "graphs" / "comparison.svg").read_bytes()]
    other = Page(write_report(make_suite(tmp_path / "other", "machado")))
    assert re.search(r"Breakout 0.7 2 400 26.50 5.30 35 0.04", other.text)
    assert "ratio 1" not in other.text


def make_search(search_dir, failure="the loss became nan"):
    """Trial 1 is the best, trial 0 was stopped, trial 2 failed before its first log point."""
    for number in (0, 1):
        write_run(search_dir / f"trial_{number}", [short(50, 100)], total_env_steps=200)
    trials = ((1e-5, 75.125, "PRUNED"), (0.00012345678, 225.0, "COMPLETE"), (0.01, None, "RUNNING"))
    write_search(search_dir, trials, user_attrs={"failure": failure})
    return search_dir


def test_the_page_of_a_search_shows_its_table_and_graphs_and_links_its_trials(tmp_path):
    search_dir = make_search(tmp_path / "search")
    for number in (0, 1):
        write_report(search_dir / f"trial_{number}")
    page = Page(write_report(search_dir))
    assert page.all("a", "href") == ["./trial_0/report.html", "./trial_1/report.html"]
    assert all((search_dir / link).is_file() for link in page.all("a", "href"))
    assert "1 0.000123 225 200 finished 0 1e-05 75.12 200 stopped by ASHA 2 0.01 - - failed: the" in page.text
    graphs = [search_dir / "graphs" / f"{name}.svg" for name in ("curves", "fields", "parallel", "importances")]
    assert page.contents("img") == [graph.read_bytes() for graph in graphs]
    assert "ppo.learning_rate step None, low 1e-05, high 0.01, log True trials 4" in page.text


def test_the_newest_video_and_evaluation_are_those_of_the_latest_date_in_their_files(tmp_path):
    """A copy of a run may give every file a new time, in any order."""
    run_dir = make_run(tmp_path / "run")
    figures = {"checkpoint": "best", "episodes": 1, "greedy": False, "mean": 1.0, "std": 0.0, "cut_off": 0}
    for step, date in ((300, "2026-01-02 00:00:00 UTC"), (400, "2026-01-01 00:00:00 UTC")):
        evaluation = run_dir / "session_0" / f"evaluation_{step}.json"
        write_json(evaluation, figures | {"date": date, "returns": [float(step)], "truncated": [False]})
        video = run_dir / "session_0" / f"video_{step}.mp4"
        video.write_bytes(str(step).encode())
        for copied in (evaluation, video):
            os.utime(copied, (step, step))
    page = Page(write_report(run_dir))
    assert page.contents("video") == [b"300"]
    assert page.text.index("evaluation_400.json") < page.text.index("evaluation_300.json")  # oldest first


# A run is data.

HOSTILE = """"><script>document.title='owned'</script><img src=x onerror=alert(1)>'{{ 7 * 7 }}"""


def make_hostile(tmp_path):
    """A run, a suite and a search whose every text is an attack."""
    run_dir = make_run(tmp_path / "run")
    values = read_json(run_dir / "config.json")
    values["config"] |= {"name": HOSTILE.replace("/", "|"), "output_dir": HOSTILE}
    values |= {
        "python": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "git_revision": [HOSTILE],
        "resumed": [{"date": HOSTILE, "changed": {HOSTILE: [HOSTILE, 1]}}],
    }
    write_json(run_dir / "config.json", values | {"hardware": HOSTILE})
    suite_dir = make_suite(tmp_path / "suite")
    values = read_json(suite_dir / "suite.json")
    games = ["Pong", "javascript:alert(1)", HOSTILE, "../run"]
    write_json(suite_dir / "suite.json", values | {"games": games, "python": HOSTILE})
    return run_dir, suite_dir, make_search(tmp_path / "search", failure=HOSTILE)


def test_hostile_values_are_shown_and_not_executed(tmp_path):
    for directory in reversed(make_hostile(tmp_path)):  # the run last: no other report may write into it
        before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(directory)}
        page = Page(write_report(directory))
        assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(directory)} == before
        assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "object", "base", "form"})
        assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
        assert "<script>document" in page.text  # as text
        assert "{{ 7 * 7 }}" in page.text
        assert all(link.startswith("./") and link.endswith("/report.html") for link in page.all("a", "href"))
        assert not [link for link in page.all("a", "href") if ".." in link]
        assert all(source.startswith("data:") for source in page.all("img", "src"))


# The command.


def test_the_command_writes_a_page_for_each_directory(tmp_path, capsys):
    run_dir = make_run(tmp_path / "a run")
    with pytest.raises(UserError, match="nowhere: not a run directory"):
        main([str(run_dir), str(tmp_path / "nowhere")])
    assert capsys.readouterr().out.splitlines() == [str(run_dir / "report.html")]
    try_report(run_dir / "session_0")  # at the end of another command, which does not fail for it
    assert capsys.readouterr().err == ""  # no traceback: it is no bug
