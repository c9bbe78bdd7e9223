"""The command line: exit statuses, errors, what output may do, options and config files, the compilation cache."""

import contextlib
import csv
import errno
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from user_commands import ROOT, run_here, skip_without_extra

from jaxrl_atari import cli, output, plots, train
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import Config, EnvConfig, PPOConfig
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.output import say, tracked
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.run_dir import make_run_dir
from jaxrl_atari.runs.writers import TerminalWriter

QBERT = ["--config", "configs/qbert.py"]


def ends(main):
    with pytest.raises(SystemExit) as end:
        cli.run(main)
    return end.value.code


def raises(error):
    def main():
        raise error

    return main


def test_user_errors_are_one_line_and_bugs_keep_their_traceback(capsys):
    assert ends(lambda: None) == 0
    assert ends(raises(UserError("no such\nfile"))) == 2
    assert ends(raises(OSError(errno.ENOSPC, "No space left on device", "data/x/metrics.csv"))) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: no such file",
        "error: data/x/metrics.csv: No space left on device",
    ]
    with pytest.raises(FileNotFoundError):
        cli.run(raises(FileNotFoundError(errno.ENOENT, "no such file")))


# --- Output ------------------------------------------------------------------------------------------------------


def shell(script, *arguments, **variables):
    """Runs a line of a shell, in which "$0" is Python, in a user's environment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", script, sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "redirect", "status", "printed"),
    [
        ('raise UserError("no such file")', "2>/dev/full", 2, ""),
        ("raise KeyboardInterrupt", "2>/dev/full", 130, ""),
        ("os.kill(os.getpid(), 15)", "2>/dev/full", 130, ""),
        ('say("a line"); say("another")', ">/dev/full", 0, ""),
        ('say("a line")', ">&-", 0, ""),
        ('say("a line")', "2>&-", 0, "a line\n"),
        ('say("±")', "", 0, "?\n"),
        ('[say("a line") for _ in range(10_000)]', "| true", 0, ""),
    ],
)
def test_the_exit_status_does_not_depend_on_the_output(body, redirect, status, printed):
    code = (
        f"import os; from jaxrl_atari import cli; from jaxrl_atari.errors import UserError\n"
        f"from jaxrl_atari.output import say\n"
        f"def main():\n    {body}\ncli.run(main)"
    )
    ended = shell(f'"$0" -c "$1" {redirect}', code, PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout, ended.stderr.replace("interrupted\n", "")) == (status, printed, "")


def test_a_terminal_that_takes_no_more_for_now_ends_nothing():
    read, write = os.pipe()
    os.set_blocking(write, False)
    stream = open(write, "w")  # noqa: SIM115
    output.write("x" * 200_000, stream)  # more than a pipe holds
    output.write("and more", stream)
    assert os.read(read, 10) == b"x" * 10
    with contextlib.suppress(BlockingIOError):
        stream.close()
    os.close(read)


class Silent:
    """A stream with no more than `write`, as a caller may put in place of `sys.stdout`."""

    text = ""

    def write(self, text):
        self.text += text


class Broken:
    def write(self, text):
        raise RuntimeError("no output here")

    isatty = flush = write


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


def test_printing_needs_no_more_than_write(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Silent())
    say("λ ± a line")
    assert sys.stdout.text == "λ ± a line\n"
    latin = io.TextIOWrapper(io.BytesIO(), "latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    say("λ ± a line")
    assert latin.buffer.getvalue() == "? ± a line\n".encode("latin-1")


def streams():
    """What `sys.stdout` may be."""
    return {
        "none": None,
        "no encoding": Silent(),
        "broken": Broken(),
        "closed": closed(),
        "latin-1": io.TextIOWrapper(io.BytesIO(), "latin-1"),
    }


@pytest.mark.parametrize("name", streams())
def test_no_stream_ends_what_prints_to_it(name, monkeypatch):
    """The lines of a run, rich's bars and live lines, help, and the answer to a signal."""
    monkeypatch.setattr(sys, "stdout", streams()[name])
    say("λ")
    assert list(tracked([1, 2], "λ")) == [1, 2]
    writer = TerminalWriter(100, "λ")
    writer.write({"env_steps": 50, "return_ma": 1.0})
    writer.message("λ")
    writer.close()
    with pytest.raises(SystemExit) as end:
        train.main(["--help"])
    assert not end.value.code
    with StopRequest(quick=False) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested


def test_help_into_a_pipe_that_closes():
    ended = shell('"$0" -m jaxrl_atari.train --help | head -n 1')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: python -m jaxrl_atari.train")


@pytest.mark.long
def test_training_without_standard_streams(tmp_path):
    """What a native library logs goes to descriptor 2, whatever it is: no stop request, and no file of the run."""
    small = "--env.num-envs 2 --ppo.rollout-length 8 --ppo.minibatch-size 16 --total-env-steps 32 --log.no-graphs"
    ended = shell(
        f'"$0" -m jaxrl_atari.train --run-dir "$1" {small} <&- >&- 2>&-', str(tmp_path), TF_CPP_MIN_LOG_LEVEL="0"
    )
    assert ended.returncode == 0
    *_, last = csv.DictReader((tmp_path / "session_0" / "metrics.csv").read_text().splitlines())
    assert last["env_steps"] == "32"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b".cc:" in path.read_bytes()]


def test_a_warning_has_no_name_of_a_module():
    """absl, which orbax imports, has set a handler of its own by then."""
    warn = "logging.getLogger('a.b').warning('slow disk')"
    ended = shell('"$0" -c "$1"', f"import logging; from jaxrl_atari import cli; cli.run(lambda: {warn})")
    assert (ended.returncode, ended.stderr) == (0, "WARNING: slow disk\n")


# --- Options -----------------------------------------------------------------------------------------------------

REFUSALS = [
    # No such option, or no option at all.
    ("train", "--sed 1", "--sed: train has no such option; did you mean --seed? (--help lists all options)"),
    ("train", "--lr 1e-4", "--lr: train has no such option; did you mean --ppo.learning-rate?"),
    ("train", "--device cuda", "--device: train has no such option; did you mean --devices.gpu?"),
    ("train", "--gamma 0.9", "did you mean --ppo.gamma?"),
    ("train", "--ppo.learnig_rate 1e-4", "did you mean --ppo.learning-rate?"),
    ("train", "--no-graphs", "did you mean --log.graphs?"),
    ("train", "--wholly-unlike-any", "error: --wholly-unlike-any: train has no such option (--help lists all"),
    ("train", "quickstart", "quickstart: belongs to no option of train; did you mean --config quickstart?"),
    ("train", "configs/qbert.py", "did you mean --config configs/qbert.py?"),
    ("train", "configs", "did you mean --resume configs?"),
    ("evaluate", "nowhere --sessions all", "--sessions: evaluate has no such option; did you mean --session?"),
    ("verify", "nowhere --sessions 1", "--sessions: verify has no such option; did you mean --session?"),
    ("export", "nowhere --to folder", "--to: export has no such option; did you mean --output?"),
    ("evaluate", "nowhere --num-episodes 3", "evaluate has no such option; did you mean --episodes?"),
    (
        "hub",
        "psh nowhere user/x",
        "psh: no such command; did you mean push? expected one of push, pull, pack",
    ),
    ("hub", "push nowhere user/x --privat", "--privat: hub push has no such option; did you mean --private?"),
    ("hub", "pack nowhere folder --chekpoint best", "hub pack has no such option; did you mean --checkpoint?"),
    ("hub", "pull user/x folder more", "more: belongs to no option of hub pull"),
    # Values that an option cannot have.
    ("train", "--seed", "error: Missing value for argument '--seed'."),
    ("train", "--seed 1.5", "error: seed = '1.5': expected a whole number from 0 to 2,147,483,647"),
    ("train", "--ppo.gamma x", "error: ppo.gamma = 'x': expected a number from 0 to 1"),
    ("train", "--ppo.gae-lambda x", "error: ppo.gae_lambda = 'x': expected a number from 0 to 1 or None"),
    ("train", "--env.backend gym", "'gym'", "--env.backend", "'ale', 'envpool'"),
    ("train", "--log.graphs maybe", "maybe: belongs to no option of train"),
    ("evaluate", "nowhere --episodes 0", "error: --episodes = 0: expected a whole number from 1 to 1,000,000"),
    ("evaluate", "nowhere --num-envs 0", "error: --num-envs = 0: expected a whole number from 1 to 4,096"),
    (
        "evaluate",
        "nowhere --checkpoint x",
        "error: --checkpoint = 'x': expected one of best, latest or a whole number",
    ),
    (
        "hub",
        "pack nowhere folder --checkpoint bset",
        "error: --checkpoint = 'bset': expected one of best, latest or a whole number from 0 to",
    ),
    ("evaluate", "", "error: RUN_DIR is missing: Directory of a run (data/NAME_TIMESTAMP) or, without"),
    (
        "plots",
        "",
        "error: DIR is missing: Directory of a run, a suite, a sweep or a search, such as data/NAME",
    ),
    ("report", "", "error: DIR is missing: Directory of a run, a suite or a search, such as data/NAME_TIMESTAMP."),
    (
        "hub",
        "push",
        "error: RUN_DIR is missing: Directory of a run, such as data/NAME_TIMESTAMP. "
        "USER/REPO is missing: Model repository on the Hub.",
    ),
    ("verify", "nowhere --sample 0", "error: --sample = 0: expected a whole number from 1 on or None"),
    ("verify", "nowhere --from x", "error: --from = 'x': expected a whole number from 0 to"),
    (
        "plots",
        "nowhere --x foo",
        "invalid choice 'foo' for argument '--x'. Expected one of ('env steps', 'hours').",
    ),
    ("benchmark", "--compare ppo.gama=1,2", "did you mean --ppo.gamma?"),
    # Raised by the config: its sections, which tyro makes, and its root.
    ("train", "--env.num-envs 0", "env.num_envs = 0: expected a whole number from 1 to 65,536"),
    ("train", "--env.fire-on-reset maybe", "env.fire_on_reset = 'maybe': expected true or false or None"),
    ("train", "--env.game Qbort", "env.game = 'Qbort'", "Qbert"),
    ("train", "--devices.gpu cuda", "devices.gpu = 'cuda': expected", "auto"),
    ("train", "--devices.data-parallel x", "devices.data_parallel = 'x': expected", "1 to 4,096 or all"),
    ("train", "--seed -1", "error: seed = -1: expected a whole number from 0 to 2,147,483,647"),
    ("train", "--ppo.minibatch-size 300", "error: ppo.minibatch_size = 300: expected a divisor"),
    # Raised by the command.
    ("train", "--config", "--config: expected one argument"),
    (
        "train",
        "--config nowhere.py",
        "error: --config nowhere.py: no such file; expected a Python file that defines",
    ),
    (
        "train",
        "--config qbert.yaml",
        "error: --config qbert.yaml: no such file; did you mean qbert? expected a Python file",
    ),
    (
        "train",
        "--config quickstrat",
        "--config quickstrat: no such file; did you mean quickstart? ",
        "qbert, quickstart",
    ),
    ("benchmark", "--resume run --config qbert", "--resume: benchmark has no such option"),
    ("devices", "--resume run --config qbert", "--resume: devices has no such option"),
    ("train", "--run-dir a --resume b", "error: --resume: the directory has its config already"),
    ("train", "--resume nowhere", "nowhere"),
    ("train", "--run-dir configs", "configs"),
    ("train", f"--output-dir . --name {'n' * 250}", "File name too long; choose a shorter name"),
    ("train", f"--run-dir {'n' * 256}", "File name too long"),
    ("train", f"--resume {'n' * 256}", "File name too long"),
    ("train", f"--config {'n' * 256}", "File name too long"),
    ("evaluate", "n" * 256, "File name too long"),
    ("train", "--output-dir /proc/nothing", "/proc/nothing"),
    ("train", "--devices.gpu 7", "devices.gpu = 7: expected"),
    ("train", "--devices.evaluator true", "evaluator = True: expected a visible GPU"),
    ("suite", "--games Pnog", "'Pnog'", "Pong"),
    ("suite", "--games Pong --devices.gpu 7", "devices.gpu = 7: expected"),
    ("suite", "--resume nowhere", "nowhere"),
    ("search", "--config configs/qbert.py", "get_search"),
    ("search", "--resume nowhere", "nowhere"),
    ("evaluate", "nowhere", "nowhere"),
    ("benchmark", "--config configs/qbert.py --seconds 0", "seconds"),
    ("plots", "nowhere", "nowhere"),
    ("report", "nowhere", "nowhere"),
    ("hub", "push nowhere user/x", "nowhere"),
    ("devices", "--config configs/qbert.py --devices.actor 1", "actor = 1: expected a visible GPU"),
]


@pytest.mark.parametrize("case", REFUSALS, ids=" ".join)
def test_a_refusal_says_what_is_wrong_and_writes_nothing(case, tmp_path, monkeypatch, capfd):
    module, line, *words = case
    skip_without_extra(module)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(SystemExit) as end:
        run_here(module, line.split())
    output = capfd.readouterr().err
    assert end.value.code == 2, output
    text = " ".join(re.sub("[│─╭╮╰╯]", " ", output).split())
    for word in words:
        assert word in text
    assert "Traceback" not in text
    assert output.count("\n") == output.count("error: ") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]


@pytest.mark.parametrize("command", ["train --output-dir", "devices --config configs/qbert.py --output-dir"])
def test_a_missing_device_is_refused_before_anything_is_written(command, tmp_path):
    """In an environment that conftest.py did not prepare: JAX has one CPU device."""
    folder, variables = tmp_path / "data", {"XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": "-1"}
    ended = shell(f'"$0" -m jaxrl_atari.{command} "$1" --devices.data-parallel 2', str(folder), **variables)
    assert (ended.returncode, folder.exists()) == (2, False)
    number = "expected at most 1, the number of JAX's CPU devices; there is no GPU: "
    assert ended.stderr.startswith(f"error: devices.data_parallel = 2: {number}")


@pytest.mark.parametrize(
    "command", ["evaluate nowhere", "evaluate nowhere --session 3", "train --resume nowhere", "verify nowhere"]
)
def test_a_directory_without_a_run_is_refused_before_the_cache_is_made(command, tmp_path):
    cache = tmp_path / "cache"
    ended = shell(f'"$0" -m jaxrl_atari.{command}', JAX_COMPILATION_CACHE_DIR=str(cache))
    assert (ended.returncode, ended.stdout, cache.exists()) == (2, "", False)
    assert ended.stderr.startswith("error: nowhere")


def test_help_shows_options_with_defaults_and_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        run_here("train", [*QBERT, "--help"])
    assert not end.value.code
    text = " ".join(re.sub("[│\x1b]|\\[[0-9;]*m", " ", capsys.readouterr().out).split())
    assert "--config {None}|PATH" in text
    assert "--seed INT Everything random in session i derives from seed + i. (default: 0)" in text
    assert "--overlap {none,update}" in text
    assert "--devices.gpu auto|true|false|INDEX" in text


def test_numbers_of_steps_are_written_as_people_write_them():
    for text in ("1e6", "1_000_000", "1000000", "1.0e6"):
        assert train.parse_options(["--total-env-steps", text]).config.total_env_steps == 1_000_000
    config = train.parse_options(
        ["--ppo.learning-rate", "1e-4", "--ppo.target-kl", "none", "--env.noop-max", "1e1"]
    ).config
    assert (config.ppo.learning_rate, config.ppo.target_kl, config.env.noop_max) == (1e-4, None, 10)
    assert type(config.env.noop_max) is int


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", True),
        ("--ppo.normalize-advantages false", False),
        ("--ppo.normalize_advantages False", False),
        ("--ppo.normalize-advantages=false", False),
        ("--ppo.normalize-advantages true", True),
        ("--ppo.no-normalize-advantages", False),
        ("--ppo.no-normalize-advantages false", True),
        ("--ppo.no-normalize-advantages --seed 1", False),
    ],
)
def test_a_value_after_a_switch_is_taken(line, expected):
    assert train.parse_options(line.split()).config.ppo.normalize_advantages is expected


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_an_error_of_tyro_is_one_line_in_any_encoding(encoding):
    ended = shell('"$0" -m jaxrl_atari.train --overlap some', PYTHONIOENCODING=encoding)
    expected = "error: invalid choice 'some' for argument '--overlap'. Expected one of ('none', 'update').\n"
    assert (ended.returncode, ended.stderr) == (2, expected)


def test_a_config_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no configs/
    assert load_config(Path("quickstart")) == load_config(ROOT / "configs" / "quickstart.py")
    assert load_config(Path("configs/qbert.py")).name == "qbert"
    assert load_config(Path("qbert.py")).name == "qbert"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "qbert.py").write_text(
        "from jaxrl_atari import Config\nget_config = lambda: Config(seed=7)"
    )
    assert load_config(Path("qbert")).seed == 7  # the user's own comes first


def test_the_config_of_a_run_is_no_config_file(tmp_path):
    """The file is sound, and there is nothing to fix in it."""
    write_json(tmp_path / "config.json", {"config": Config().to_dict()})
    with pytest.raises(UserError, match=rf"a run is continued with --resume {tmp_path}$"):
        load_config(tmp_path / "config.json")


def test_a_tilde_in_a_path_is_the_home_directory(tmp_path, monkeypatch):
    """bash leaves it alone in `--output=~/graphs`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = cli.options.parse(plots.Options, ["~/run", "~/other", "--output=~/graphs"], "plots")
    paths = (options.run_dir, *options.others, options.output)
    assert paths == (tmp_path / "run", tmp_path / "other", tmp_path / "graphs")
    unknown = cli.options.read_sources(["--run-dir", "~no such user/run"])
    assert unknown.run_dir == Path("~no such user/run")  # as in a shell; it was a traceback


def test_the_command_that_was_meant_is_named():
    for line, status, words in (
        (
            "trian --seed 1",
            2,
            "error: trian: no such command; did you mean train? expected one of train, evaluate",
        ),
        ("--help", 0, "usage: python -m jaxrl_atari.COMMAND"),
        ("", 0, "usage: python -m jaxrl_atari.COMMAND"),
    ):
        ended = shell(f'"$0" -m jaxrl_atari {line}')
        assert (ended.returncode, "Traceback" in ended.stderr) == (status, False)
        assert words in ended.stdout + ended.stderr


def test_the_rules_of_the_protocol_are_options():
    line = "--env.life-loss-terminal false --env.clip-rewards True --env.sticky-actions 0.1 --env.noop-max None"
    env = train.parse_options(line.split()).config.env
    assert (env.life_loss_terminal, env.clip_rewards, env.sticky_actions, env.noop_max) == (False, True, 0.1, None)


def test_run_dir_starts_a_run_or_continues_the_one_it_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = [*QBERT, "--run-dir", str(tmp_path / "run"), "--sessions", "2"]
    options = train.parse_options(line)
    config, run_dir = options.config, options.directory
    assert (config.name, config.sessions, run_dir) == ("qbert", 2, tmp_path / "run")
    assert not run_dir.exists()
    saved = replace(config, ppo=PPOConfig(gamma=0.5))
    write_json(make_run_dir(config, run_dir) / "config.json", describe(saved))
    again = train.parse_options(line)
    assert (again.config, again.directory) == (saved, run_dir)
    assert (
        f"differs from {run_dir}, which keeps its own values: sessions 1 -> 2, ppo.gamma"
        in capsys.readouterr().out
    )
    assert train.parse_options(["--resume", str(run_dir), "--ppo.gamma", "0.9"]).config.ppo.gamma == 0.9


# --- Config files ------------------------------------------------------------------------------------------------


def test_every_shipped_config_runs():
    for path in ROOT.glob("configs/*.py"):
        if path.stem.startswith("search_") and importlib.util.find_spec("optuna") is None:
            continue
        config = load_config(path)
        assert path.stem.endswith(config.name)


def test_reinforce_and_the_quickstart_are_what_their_pages_say():
    reinforce, quickstart = (
        load_config(ROOT / "configs" / f"{name}.py") for name in ("reinforce_qbert", "quickstart")
    )
    ppo = reinforce.ppo
    assert (ppo.epochs, reinforce.num_minibatches, ppo.gae_lambda, ppo.entropy_coef) == (1, 1, 1.0, 0.0)
    assert (ppo.normalize_advantages, ppo.clip_value_loss) == (False, False)
    assert (quickstart.env, quickstart.total_env_steps) == (EnvConfig(game="CrazyClimber"), 500_000)
    assert quickstart.ppo == PPOConfig()


@pytest.mark.parametrize("option", ["coordinator=host:1234", "num-processes=2", "process-index=0"])
def test_options_of_several_processes_need_their_switch(option, tmp_path):
    """Without it, each process would train a run of its own."""
    given = f"--devices.{option}"
    with pytest.raises(ConfigError, match=r"^devices\.\w+ = .*: expected None .*; add --devices\.distributed$"):
        train.parse_options([given])
    assert train.parse_options([given, "--devices.distributed"]).config.devices.distributed
    config = train.parse_options([given, "--devices.distributed"]).config
    write_json(tmp_path / "config.json", {"config": config.to_dict()})
    alone = train.parse_options(["--resume", str(tmp_path), "--devices.no-distributed"])  # docs/devices.md
    assert not alone.config.devices.distributed


def test_anchor_steps_need_a_back_end_that_records_games_and_stored_runs_may_have_them(tmp_path):
    given = ["--env.backend", "envpool", "--env.anchor-steps", "100"]
    message = r"^env\.anchor_steps = 100: expected 0 with env\.backend = envpool, where it does nothing$"
    with pytest.raises(ConfigError, match=message):
        train.parse_options(given)
    stored = Config(env=EnvConfig(backend="envpool", anchor_steps=100))
    write_json(tmp_path / "config.json", {"config": stored.to_dict()})
    assert train.parse_options(["--resume", str(tmp_path)]).config == stored
    with pytest.raises(ConfigError, match=r"^env\.anchor_steps = 50: expected 0"):
        train.parse_options(["--resume", str(tmp_path), "--env.anchor-steps", "50"])


@pytest.mark.parametrize("command", [cli.options.FromConfig, cli.options.FromDirectory])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--devices.num-processes 4", "devices.num_processes = 4: expected None without devices.distributed"),
        (
            "--env.backend envpool --env.anchor-steps 7",
            "env.anchor_steps = 7: expected 0 with env.backend = envpool",
        ),
    ],
)
def test_options_without_effect_are_refused_by_every_command_with_a_config(command, line, message):
    with pytest.raises(ConfigError, match=message):
        cli.options.parse(command, line.split(), "suite", command())


def test_a_config_file_may_import_its_neighbour_from_any_folder(tmp_path, monkeypatch):
    (tmp_path / "neighbour_of_the_config.py").write_text("SEED = 7")
    (tmp_path / "config.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom jaxrl_atari import Config\n"
        "from neighbour_of_the_config import SEED\n@dataclass\nclass Mine:\n    seed: int = SEED\n"
        "def get_config(): return Config(seed=Mine().seed)\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert train.parse_options(["--config", "~/config.py"]).config.seed == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "get_config"),
        ("def get_config(:", "SyntaxError"),
        ("def get_config(): return 1", r"get_config\(\) returned int; expected Config"),
        ("from jaxrl_atari import *\ndef get_config(): return Config(seed=-1)", "seed = -1"),
        ("import nothing_like_this", r"config\.py, line 1: ModuleNotFoundError: .*; fix the file"),
        ("import sys\nsys.exit(0)", r"config\.py, line 2: SystemExit: 0; fix the file"),
    ],
)
def test_an_unusable_config_file(tmp_path, text, message):
    (tmp_path / "config.py").write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "config.py")


# --- Settings of the process -------------------------------------------------------------------------------------


def configured(before="pass", after="pass", **variables):
    """The lines of `tune_process()` in a fresh process, in which only `variables` are set."""
    code = f"import os, jax; from jaxrl_atari.process_tuning import tune_process; {before}"
    code += "; print(*tune_process(), sep='\\n')"
    unset = "unset JAX_COMPILATION_CACHE_DIR JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS XDG_CACHE_HOME HOME; "
    given = "".join(f"export {name}={value}; " for name, value in variables.items())
    ended = shell(f'{unset}{given}"$0" -c "$1"', f"{code}; {after}")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_default_cache_folder_keeps_compiled_programs(tmp_path):
    """The first process fills the folder, and the second one adds nothing. XLA's threads change what is
    compiled."""
    folder, programs = tmp_path / ".cache" / "jaxrl_atari" / "xla" / "threads_3", []
    for _ in range(2):
        output = configured(after="jax.jit(lambda x: 3 * x + 1)(2.0)", HOME=tmp_path, NPROC=3)
        assert output == f"compiled programs are kept in {folder}\n"
        programs.append(sorted(path.name for path in folder.iterdir() if not path.name.endswith("-atime")))
    assert programs[0] == programs[1]
    assert any("lambda" in name for name in programs[0])


def test_programs_in_a_folder_of_the_user_depend_on_the_number_of_threads_too(tmp_path):
    for threads in (2, 3):
        folder = tmp_path / f"threads_{threads}"
        output = configured(JAX_COMPILATION_CACHE_DIR=tmp_path, NPROC=threads)
        assert output == f"compiled programs are kept in {folder}\n"
        assert configured(JAX_COMPILATION_CACHE_DIR=folder, NPROC=threads) == output, "the folder of that line"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"JAXRL_ATARI_NO_TUNING": "1"}, "JAXRL_ATARI_NO_TUNING"),
        ({"JAX_COMPILATION_CACHE_DIR": ""}, "JAX_COMPILATION_CACHE_DIR"),
        ({"JAX_ENABLE_COMPILATION_CACHE": "false"}, "JAX_ENABLE_COMPILATION_CACHE"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "/dev/null/jaxrl_atari/xla/threads_"),
    ],
)
def test_settings_that_are_the_users_or_cannot_be_made(variables, line):
    # malloc is the user's: not a word of it.
    (output,) = configured(**variables, MALLOC_TOP_PAD_="65536").splitlines()
    assert output.startswith(("process tuning off", "compiled programs are not kept: "))
    assert line in output


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without an entry in /etc/passwd")
def test_a_user_without_a_home_gets_no_cache():
    output = configured("os.setuid(54_321)")
    assert re.search("compiled programs are not kept: .* home.*JAX_COMPILATION_CACHE_DIR", output)


def test_search_without_its_extra_is_one_line(environment):
    code = (
        "import runpy, sys; sys.modules['optuna'] = None; "
        "runpy.run_module('jaxrl_atari.search', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    words = "search mode needs Optuna and Ray: pip install 'jaxrl_atari[search]'"
    assert re.fullmatch(f"error: .*optuna.*; {re.escape(words)}\n", done.stderr)


def test_an_interruption_is_one_line_with_status_130():
    code = "import signal; from jaxrl_atari import cli; cli.run(lambda: signal.raise_signal(signal.SIGINT))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
