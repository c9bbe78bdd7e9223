"""A trace of training, in the formats of Perfetto and xprof."""

import gzip
import json
from pathlib import Path

from jaxrl_atari.benchmark import __main__ as benchmark

TINY = ["--env.game", "Breakout", "--env.num-envs", "4", "--env.num-threads", "1",
        "--ppo.rollout-length", "16", "--ppo.minibatch-size", "32", "--ppo.epochs", "1"]  # fmt: skip


def test_a_trace_shows_iterations_of_the_steady_state_and_no_compilation(tmp_path, capsys):
    benchmark.main([*TINY, "--repeats", "2", "--trace", str(tmp_path / "trace")])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [Path(file).name.partition(".")[2] for file in result["trace"]]
    assert names == ["trace.json.gz", "xplane.pb"]  # Perfetto; xprof
    with gzip.open(result["trace"][0]) as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "iteration"]
    assert len(spans) == 2
    updates = [event["ts"] for event in events if event["name"] == "PjitFunction(update)"]
    assert all(any(start <= at <= end for at in updates) for start, end in spans)
    assert not [event["name"] for event in events if "compile" in event["name"].lower()]
