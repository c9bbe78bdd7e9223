"""The command line: exit statuses, errors of one line, option parsing, config files, and the compilation cache."""

import contextlib
import dataclasses
import errno
import importlib
import os
import pickle
import platform
import pwd
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import tyro

import jaxrl_atari.search.__main__ as search_command
import jaxrl_atari.suite.__main__ as suite_command
from jaxrl_atari import cli, devices, train
from jaxrl_atari.config import Config, load_config_file
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware import gpus, report
from jaxrl_atari.hardware.cpu import usable_cores
from jaxrl_atari.runs.description import describe, make_run_dir, write_description

PACKAGE = Path(cli.__file__).parents[1]


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
    assert ends(raises(UserError("no such file"))) == 2
    assert ends(raises(OSError(errno.ENOSPC, "No space left on device", "data/x/metrics.csv"))) == 2
    assert ends(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err.splitlines() == [
        "error: no such file",
        "error: data/x/metrics.csv: No space left on device; free some space, then run the command again (--resume"
        " continues a run)",
        "interrupted",
    ]
    with pytest.raises(FileNotFoundError):
        cli.run(raises(FileNotFoundError(errno.ENOENT, "no such file")))


def test_errors_are_one_line_and_cross_processes():
    error = ConfigError("ppo.gamma", 2, "a number\nfrom 0 to 1", "use 0.99")
    assert str(error) == "ppo.gamma = 2: expected a number from 0 to 1; use 0.99"
    assert isinstance(error, UserError)
    assert isinstance(error, ValueError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(pickle.loads(pickle.dumps(UserError("no\n  such file")))) == "no such file"


def test_a_warning_has_no_name_of_a_module():
    """absl, which orbax imports, has set a handler of its own by then."""
    code = """if True:
        import logging
        from jaxrl_atari import cli
        logging.basicConfig()
        cli.run(lambda: logging.getLogger("a.b").warning("the disk is slow"))
    """
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "WARNING: the disk is slow\n")


def test_output_that_cannot_be_written_ends_nothing():
    """Nobody reads standard output, or it has no "±"."""
    code = """if True:
        import os, sys
        from jaxrl_atari import cli
        def main():
            cli.say("\u00b1")
            read, write = os.pipe()
            os.dup2(write, 1)
            os.close(write)
            os.close(read)
            cli.say("nobody reads this")
            cli.say("nor this")
        cli.run(main)
    """
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(PACKAGE.parent)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "?\n", "")


@pytest.mark.parametrize(
    ("body", "redirect", "status"),
    [
        ('raise cli_errors.UserError("no such file")', "2>/dev/full", 2),
        ("raise KeyboardInterrupt", "2>/dev/full", 130),
        ("os.kill(os.getpid(), 15)", "2>/dev/full", 130),
        ('cli.say("a line")', ">/dev/full", 0),
        ('cli.say("a line")', ">&-", 0),
        ('cli.say("a line")', "2>&-", 0),
    ],
)
def test_the_exit_status_does_not_depend_on_the_output(body, redirect, status):
    code = (
        f"import os; from jaxrl_atari import cli; from jaxrl_atari import errors as cli_errors\n"
        f"def main():\n    {body}\ncli.run(main)"
    )
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, code]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)}, capture_output=True)
    assert ended.returncode == status, ended.stderr


def test_a_terminal_that_takes_no_more_for_now_ends_nothing():
    read, write = os.pipe()
    os.set_blocking(write, False)
    stream = open(write, "w")  # noqa: SIM115
    cli.write("x" * 200_000, stream)  # more than a pipe holds
    cli.write("and more", stream)
    assert os.read(read, 10) == b"x" * 10
    with contextlib.suppress(BlockingIOError):
        stream.close()
    os.close(read)


@pytest.mark.parametrize(
    ("option", "text", "words"),
    [
        ("--run-dir", "", "--run-dir: expected a path, found nothing; perhaps a shell variable is not set"),
        ("--resume", "", "--resume: expected a path, found nothing"),
        ("--config", "", "--config: expected a path, found nothing"),
        ("--run-dir", "~no_such_user/run", "--run-dir ~no_such_user/run: there is no such user"),
    ],
)
@pytest.mark.parametrize("command", [train, suite_command, search_command])
def test_paths_that_are_none(command, option, text, words):
    config = [] if option == "--config" else ["--config", "configs/qbert.py"]
    with pytest.raises(UserError) as error:
        command.parse([*config, option, text])
    assert str(error.value).startswith(words)


def test_run_dir_starts_a_run_or_continues_the_one_it_holds(tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)
    line = [*QBERT, "--run-dir", str(tmp_path / "run"), "--sessions", "2"]
    config, run_dir = train.parse(line)
    assert (config.name, config.sessions, run_dir) == ("qbert", 2, tmp_path / "run")
    assert not tmp_path.joinpath("run").exists()
    saved = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, gamma=0.5))
    write_description(make_run_dir(config, run_dir), describe(saved))
    assert train.parse(line) == (saved, run_dir)
    assert "differs from the run, which keeps its own ppo.gamma = 0.5; give an option" in capsys.readouterr().out
    assert train.parse(["--run-dir", str(run_dir), "--total-env-steps", "5000000"])[0].total_env_steps == 5_000_000
    assert train.parse([*line, "--ppo.gamma", "0.9"])[0].ppo.gamma == 0.9
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo.png").touch()
    with pytest.raises(UserError, match=r"--run-dir .*other: holds photo.png, and no run; choose another folder"):
        make_run_dir(config, tmp_path / "other")
    with pytest.raises(UserError, match=r"--run-dir .*none: holds no run; give --config FILE"):
        train.parse(["--run-dir", str(tmp_path / "none")])
    with pytest.raises(UserError, match="--resume and --run-dir: both name the run directory"):
        train.parse(["--run-dir", str(run_dir), "--resume", str(run_dir)])


def test_a_missing_device_is_refused_before_anything_is_written(tmp_path, request):
    """Through the real commands, in an environment that conftest.py did not prepare: JAX has one CPU device."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(PACKAGE.parent), "CUDA_VISIBLE_DEVICES": "-1"}
    for command in (["train", "--output-dir", str(tmp_path / "data")], ["devices"]):
        ended = subprocess.run(
            [sys.executable, "-m", f"jaxrl_atari.{command[0]}", *QBERT, *command[1:], "--devices.data-parallel", "2"],
            cwd=request.config.rootpath, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith("error: devices.data_parallel = 2: expected at most 1, the CPU devices of JAX")
        assert not (tmp_path / "data").exists()


QBERT = ["--config", "configs/qbert.py"]


# Every kind of error that tyro reports. If a new version of tyro fails this test, adapt `cli.options._one_line`.
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seed", "1e6"], "--seed: expected a whole number such as 1000000, got '1e6'; --help shows all options"),
        (["--seed=x"], "--seed: expected a whole number such as 1000000, got 'x'; --help shows all options"),
        (["--ppo.gamma", "x"], "--ppo.gamma: expected a number such as 0.001, got 'x'; --help shows all options"),
        (["--ppo.gae-lambda", "x"], "--ppo.gae-lambda: expected None|FLOAT, got 'x'; --help shows all options"),
        (
            ["--env.backend", "gym"],
            "invalid choice 'gym' for argument '--env.backend'. Expected one of ('ale', 'envpool');"
            " --help shows all options",
        ),
        (["--seed"], "Missing value for argument '--seed'. Expected 1 values; --help shows all options"),
        (
            ["--log.graphs=False"],
            "False follows an option that is on or off: the option alone turns it on, and no- after the last dot"
            " of a config's field turns it off (--log.no-graphs); --help shows all options",
        ),
        (["--log.graphs", "2"], "Unrecognized options: 2; --help shows all options"),
        (["--sed", "1"], "Unrecognized options: --sed, 1; did you mean --seed?; --help shows all options"),
        (["--xyzzy"], "Unrecognized options: --xyzzy; --help shows all options"),
        # Errors of the config itself, raised by its root, by one of its sections, and by the parser of an option.
        (["--seed", "-1"], "seed = -1: expected a whole number from 0 to 2,147,483,647"),
        (["--env.num-envs", "0"], "env.num_envs = 0: expected a whole number from 1 to 65,536"),
        (
            ["--devices.gpu", "cuda"],
            "devices.gpu = 'cuda': expected auto, true, false or a device index such as 0",
        ),
        (
            ["--devices.data-parallel", "x"],
            "devices.data_parallel = 'x': expected a whole number from 1 to 4,096 or all",
        ),
        (["--name", "a/b"], "name = 'a/b': expected a plain file name"),
    ],
)
def test_errors_of_options(arguments, message, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    for columns in ("40", "80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        with pytest.raises(UserError) as error:
            train.parse([*QBERT, *arguments])
        assert str(error.value) == message


def test_errors_of_options_without_a_utf8_terminal(request):
    code = "import sys; from jaxrl_atari import cli, train; cli.run(lambda: train.parse(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, *QBERT, "--sed", "1"],
        cwd=request.config.rootpath,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: Unrecognized options: --sed, 1; did you mean --seed?; --help shows all options\n"


def test_a_missing_argument_is_named():
    @dataclasses.dataclass
    class Options:
        run_dir: tyro.conf.Positional[Path]

    with pytest.raises(UserError, match=r"^missing: PATH run-dir \(required\); --help shows all options"):
        cli.parse(Options, [], prog="python -m a.command")


def test_a_config_error_keeps_its_type():
    with pytest.raises(ConfigError) as error:
        cli.parse(Config, ["--seed", "-1"], default=Config())
    assert (error.value.field, error.value.value) == ("seed", -1)


def test_help_shows_options_with_defaults_and_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as end:
        cli.parse(Config, ["--help"], default=Config(seed=7), prog="a command")
    assert not end.value.code
    text = " ".join(re.sub("[│\x1b]|\\[[0-9;]*m", " ", capsys.readouterr().out).split())
    assert "--seed INT Everything random in session i derives from seed + i. (default: 7)" in text
    assert "--env.backend {ale,envpool} Emulator pool" in text
    assert "--network.name {nature,impala}" in text
    assert "--devices.gpu auto|true|false|INDEX" in text
    assert "--devices.data-parallel N|all" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--confg", "configs/qbert.py"], "one is needed; for example --config configs/qbert.py; given were --confg"),
        (["--config"], "argument --config: expected one argument; --help shows all options"),
    ],
)  # fmt: skip
def test_errors_of_the_first_options(arguments, message):
    with pytest.raises(UserError) as error:
        train.parse(arguments)
    assert message in str(error.value)


def test_config_files_that_exit_or_raise(tmp_path, monkeypatch):
    path = tmp_path / "c.py"
    path.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=r"c.py, line 2: SystemExit: 0; fix the file"):
        load_config_file(path)
    path.write_text("def get_config():\n    return nothing\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"c.py, line 2: NameError: name 'nothing' is not defined; fix the file"):
        load_config_file("~/c.py")


REFUSALS = [
    (
        "train",
        "--config configs/qbert.py --devices.memory-fraction 0.3",
        "devices.memory_fraction = 0.3: expected None on a CPU",
    ),
    ("train", "--config configs/qbert.py --devices.actor 1", "actor = 1: expected a visible GPU (visible: none"),
    ("train", "--config configs/qbert.py --devices.evaluator true", "evaluator = True: expected a visible GPU (visi"),
    ("train", "--config configs/qbert.py --devices.gpu false --devices.actor true", "actor = True: expected a visible"),
    ("train", "--config configs/qbert.py --devices.gpu 7", "devices.gpu = 7: expected"),
    ("train", "--config configs/qbert.py --env.game Qbort", "env.game = 'Qbort'"),
    ("train", "--config configs/qbert.py --ppo.minibatch-size 300", "ppo.minibatch_size = 300: expected a divisor"),
    ("train", "--config configs/qbert.py --output-dir /proc/nothing", "choose a folder that can be written to"),
    ("train", "--config configs/qbert.py --resume data", "give one of the two"),
    ("train", "--config nowhere.py", "nowhere.py: no such file"),
    ("train", "--resume nowhere", "nowhere: not a run directory"),
    ("train", "", "--config or --resume: one is needed"),
    ("train", "--config configs/qbert.py --total-env-steps 10", "total_env_steps = 10: expected at least one rollout"),
    ("train", "--config configs/qbert.py --overlap update --devices.distributed", "overlap = 'update': expected none"),
    (
        "train",
        "--config configs/qbert.py --network.name impala --devices.deterministic",
        "devices.deterministic = True",
    ),
    ("train", "--config configs/qbert.py --env.num-groups 3", "env.num_groups = 3: expected a divisor"),
    ("train", "--config configs/qbert.py --run-dir configs", "--run-dir configs: holds"),
    ("train", "--config configs/qbert.py --run-dir /proc/nothing", "choose a folder that can be written to"),
    ("train", "--config configs/qbert.py --run-dir a --resume b", "give one of the two"),
    ("suite", "--games Pnog", "did you mean Pong"),
    ("suite", "--games Pong --devices.gpu 7", "devices.gpu = 7: expected"),
    ("suite", "--games Pong --output-dir /proc/nothing", "choose a folder that can be written to"),
    ("suite", "--games Pong --run-dir configs", "--run-dir configs: holds"),
    ("suite", "--games Pong --report-at 0", "--report-at 0: expected env steps"),
    ("suite", "--games Pong --compare nowhere", "--compare nowhere: not a suite directory"),
    ("suite", "--resume nowhere", "nowhere: not a suite directory"),
    ("search", "--config configs/qbert.py", "has no get_search()"),
    ("search", "--config configs/search_qbert.py --search.trials 0", "search.trials = 0"),
    ("search", "--config configs/search_qbert.py --search.retries -1", "search.retries = -1"),
    ("search", "--config configs/search_qbert.py --total-env-steps 4096", "search.grace_env_steps"),
    ("search", "--resume nowhere", "nowhere: not a search directory"),
    ("evaluate", "nowhere", "nowhere: no such directory"),
    ("evaluate", "configs", "configs: not a run directory"),
    ("benchmark", "--config configs/qbert.py --seconds 0", "--seconds = 0.0: expected a number above 0"),
    ("benchmark", "--config configs/qbert.py --compare gpu,cpu", "no GPU to compare with"),
    ("benchmark", "--config configs/qbert.py --scale num_envs=8", "expected FIELD=VALUE,VALUE"),
    ("plots", "nowhere", "nowhere"),
    ("hub", "push nowhere user/x", "nowhere: no such directory"),
    ("hub", "pull user/a/b new", "user/a/b: not a repository name"),
    ("devices", "--config nowhere.py", "nowhere.py: no such file"),
    ("devices", "--config configs/qbert.py --devices.actor 1", "actor = 1: expected a visible GPU (visible: none"),
]


@pytest.mark.parametrize(("name", "line", "message"), REFUSALS, ids=[f"{name} {line}" for name, line, _ in REFUSALS])
def test_a_refusal_is_one_line_and_writes_nothing(name, line, message, tmp_path, monkeypatch, request, capfd):
    """Every command. The refusal of a CPU device that JAX lacks is tested above, in fresh processes."""
    if name == "hub":
        pytest.importorskip("huggingface_hub")
    (tmp_path / "configs").symlink_to(request.config.rootpath / "configs")
    before = sorted((tmp_path / "configs").iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpus, "visible", lambda: gpus.Visible((), "none here"))
    module = {"suite": "suite.__main__", "search": "search.__main__", "evaluate": "evaluate.__main__",
              "benchmark": "benchmark.__main__", "hub": "hub.__main__"}.get(name, name)  # fmt: skip
    if name == "devices":
        main = partial(report.main, devices.pick_device)
    else:
        main = importlib.import_module(f"jaxrl_atari.{module}").main
    assert ends(lambda: main(line.split())) == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]
    assert sorted((tmp_path / "configs").iterdir()) == before


# --- The compilation cache -------------------------------------------------------------------------------------------


def configured(code="pass", **variables):
    """The lines of `runtime.configure()` in a fresh process; a variable that is None is removed."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(PACKAGE.parent), **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    code = f"import os; from jaxrl_atari.hardware import runtime; {code}; print(*runtime.configure(), sep='\\n')"
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_malloc_keeps_freed_memory_unless_the_user_has_set_it(tmp_path):
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "malloc keeps freed memory" in configured(**home)
    assert "malloc keeps" not in configured(**home, MALLOC_TOP_PAD_="65536")
    assert configured(**home, JAXRL_ATARI_NO_TUNING="1") == "process tuning off (JAXRL_ATARI_NO_TUNING)\n"


def test_a_full_disk_behind_the_output_does_not_end_training(tmp_path):
    """As in `train ... > FILE`, where the run's own files are on another disk. /dev/full refuses what is written."""
    code = "from jaxrl_atari import cli; cli.run(lambda: [cli.say('a line') for _ in range(3)])"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, env=environment)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_read_only_cache_is_reported(tmp_path):
    (tmp_path / "file").touch()
    out = configured(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert f"compiled programs are not kept: {tmp_path}/file/jaxrl_atari/xla/threads_" in out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without an entry in /etc/passwd")
def test_a_user_without_a_home_gets_no_cache(tmp_path):
    unknown = {"HOME": None, "XDG_CACHE_HOME": None, "code": "os.setuid(54_321)"}
    assert "compiled programs are not kept: this user has no home; set HOME or" in configured(**unknown)
    unknown |= {"XDG_CACHE_HOME": str(tmp_path / "missing")}
    assert "missing/jaxrl_atari/xla/threads_" in configured(**unknown)


def test_without_home_the_cache_is_in_the_home_of_the_passwd_entry():
    """Without touching that folder: the check of write permission is replaced."""
    code = "runtime._can_write = lambda folder: False"
    out = configured(code, HOME=None, XDG_CACHE_HOME=None)
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        assert "this user has no home" in out
    else:
        assert f"compiled programs are not kept: {home}/.cache/jaxrl_atari/xla/threads_" in out


def test_the_default_cache_folder_keeps_compiled_programs(tmp_path):
    """In a home of its own: the first process fills the folder, and the second one adds nothing."""
    code = (
        "import sys, jax; from jaxrl_atari.hardware import runtime; print(*runtime.configure(), sep='\\n');"
        "jax.jit(lambda x: 3 * x + 1)(2.0)"
    )
    unwanted = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    folder, programs = tmp_path / ".cache" / "jaxrl_atari" / "xla" / f"threads_{usable_cores()}", []
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert f"compiled programs are kept in {folder}" in ended.stdout, ended.stderr
        programs.append(sorted(path.name for path in folder.iterdir() if not path.name.endswith("-atime")))
    assert programs[0] == programs[1]
    assert any("lambda" in name for name in programs[0])


def test_each_number_of_threads_has_a_cache_of_its_own(tmp_path):
    """JAX's key of a program does not have the number of XLA's threads, by which the program differs."""
    for threads in ("1", "3"):
        out = configured(XDG_CACHE_HOME=str(tmp_path), NPROC=threads)
        assert f"compiled programs are kept in {tmp_path}/jaxrl_atari/xla/threads_{threads}\n" in out


def test_a_cache_in_a_bucket_is_left_to_jax(tmp_path):
    code = f"os.chdir({str(tmp_path)!r})"
    assert "compiled programs are kept in gs://bucket/cache" in configured(
        code, JAX_COMPILATION_CACHE_DIR="gs://bucket/cache"
    )
    assert not list(tmp_path.iterdir())
    assert "not kept: JAX_COMPILATION_CACHE_DIR is empty" in configured(code, JAX_COMPILATION_CACHE_DIR="")
