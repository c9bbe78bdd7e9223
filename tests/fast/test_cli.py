"""The command line: exit statuses, refusals, options and config files."""

import errno
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from user_commands import ROOT, one_error_line, run_here

from jaxrl_atari import cli, train
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.run_dir import make_run_dir


def raises(error):
    def main():
        raise error

    return main


def test_errors_are_one_line_and_bugs_keep_their_traceback(capsys):
    for error, status, line in (
        (None, 0, ""),
        (UserError("no such\nfile"), 2, "error: no such file\n"),
        (OSError(errno.ENOSPC, "Full", "data/x/metrics.csv"), 2, "error: data/x/metrics.csv: Full\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'\n"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.run(raises(error) if error else lambda: None)
        printed = capsys.readouterr().err
        assert (end.value.code, printed.startswith("Traceback")) == (status, status == 1)
        assert printed.endswith(line)


ONE_OF_TWO = "--devices.distributed --devices.data-parallel all --devices.num-processes 2 --devices.process-index"
REFUSED = {
    "__main__ trian --seed 1": "did you mean train?",
    "train --env.num-envs 0": "env.num_envs = 0: expected a whole number of at least 1",
    "train --env.game Qbort": "env.game = 'Qbort'",
    "train --devices.gpu cuda": "devices.gpu = 'cuda'",
    "train --devices.gpu 7": "devices.gpu = 7",
    "train --devices.num-processes 2": "add --devices.distributed",
    "train --ppo.minibatch-size 300": "ppo.minibatch_size = 300: expected a divisor",
    "train --config nowhere.py": "--config nowhere.py: no such file",
    "train --resume nowhere": "nowhere",
    "train --run-dir a --resume b": "--resume",
    "train --run-dir configs": "configs",
    f"train --output-dir . --name {'n' * 250}": "File name too long",
    "train --output-dir /proc/nothing": "/proc/nothing",
    "suite --games Pnog": "Pong",
    "suite --resume nowhere": "nowhere",
    "train --network.name other": "network.name = 'other'",
    "train --network.name nature_lstm --ppo.minibatch-size 4": "ppo.minibatch_size = 4",
    'train --ppo.coefficients {"z_los":1}': "z_los",
    "train --env.wrapper halves": "add --env.backend gymnasium",
    "train --env.backend gymnasium --env.game ALE/Pong-v5 --env.wrapper thirds": "env.wrapper = 'thirds'",
    "train --env.backend gymnasium --env.game Nowhere-v0": "--import",
    "train --env.backend gymnasium --env.game CartPole-v1 --env.noop-max 3": "env.noop_max = 3",
    'train --env.backend gymnasium --env.game ALE/Pong-v5 --env.options {"a":[{"b":"os:system"}]}': "env.options",
    'train --env.backend gymnasium --env.game ALE/Pong-v5 --env.options {"continuous":true}': "discrete",
    'train --env.backend gymnasium --env.game ALE/Pong-v5 --env.options {"frameskip":2}': "frameskip",
    f"train {ONE_OF_TWO} 0 --devices.coordinator localhost:9": "devices.distributed: expected --run-dir",
    f"train --run-dir a {ONE_OF_TWO} 0 --devices.data-parallel 2": "devices.data_parallel = 2: expected all",
    f"train --run-dir a {ONE_OF_TWO} 0 --devices.coordinator localhost": "expected HOST:PORT, with a free",
    f"train --run-dir a {ONE_OF_TWO} 2 --devices.coordinator localhost:9": "devices.process_index = 2: expected",
    "search --config configs/qbert.py": "get_search",
    "evaluate nowhere": "nowhere",
    "evaluate nowhere --episodes 0": "--episodes = 0: expected a whole number of at least 1",
    "verify nowhere": "nowhere",
    "plots nowhere": "nowhere",
    "report nowhere": "nowhere",
    "hub push nowhere user/x": "nowhere",
    "benchmark --config configs/qbert.py --seconds 0": "--seconds = 0",
    "benchmark --config configs/qbert.py --parts env,actin": "--parts = 'env,actin'",
    "benchmark --config configs/qbert.py --compare overlap=none,update --parts env,acting": "one part",
    "benchmark --config configs/qbert.py --compare env.num_envs=8": "cpu,gpu or FIELD=VALUE,VALUE,...",
    "benchmark --config configs/qbert.py --compare env.num_envs=4,5": "ppo.minibatch_size",
    "benchmark --config configs/qbert.py --compare cpu,gpu": "devices.gpu = True: expected a visible GPU",
    "devices --config configs/qbert.py --devices.actor 1": "devices.actor = 1",
}
"""Command line -> what its one line of error names."""


def test_a_refusal_is_one_line_that_names_the_value_and_nothing_is_written(tmp_path, monkeypatch, capfd):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    for line, named in REFUSED.items():
        module, *words = line.split()
        if module in ("search", "hub") and importlib.util.find_spec("optuna") is None:
            continue
        with pytest.raises(SystemExit) as end:
            run_here(module, words)
        assert end.value.code == 2, line
        assert named in one_error_line(capfd.readouterr().err), line
        assert [path.name for path in tmp_path.iterdir()] == ["configs"], line


def test_values_are_read_as_people_write_them():
    line = "--total-env-steps 1e6 --ppo.learning-rate 1e-4 --ppo.target-kl None --env.noop-max 1_0 --log.no-graphs"
    line += " --devices.gpu 0 --env.clip-rewards false"
    config = train.parse_options(line.split()).config
    assert (config.total_env_steps, config.ppo.learning_rate, config.ppo.target_kl) == (1_000_000, 1e-4, None)
    assert (config.env.noop_max, config.log.graphs, config.env.clip_rewards) == (10, False, False)
    assert config.devices.gpu == 0
    assert config.devices.gpu is not False, "an index, and not the switch"
    coefficients = train.parse_options(["--ppo.coefficients", '{"max_c": 0.5}']).config.ppo.coefficients
    assert coefficients == {"max_c": 0.5}


def test_a_config_is_found_by_its_name_and_the_users_own_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no configs/
    assert load_config(Path("quickstart")) == load_config(ROOT / "configs" / "quickstart.py")
    assert load_config(Path("configs/qbert.py")).name == "qbert"
    assert load_config(Path("configs/dialects/sb3.py")).name == "sb3"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "qbert.py").write_text(
        "from jaxrl_atari import Config\nget_config = lambda: Config(seed=7)"
    )
    assert load_config(Path("qbert")).seed == 7


def test_run_dir_starts_a_run_or_continues_the_one_it_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = ["--config", "configs/qbert.py", "--run-dir", str(tmp_path / "run"), "--sessions", "2"]
    options = train.parse_options(line)
    config, run_dir = options.config, options.directory
    assert (config.name, config.sessions, run_dir) == ("qbert", 2, tmp_path / "run")
    assert not run_dir.exists()
    saved = replace(config, ppo=PPOConfig(gamma=0.5))
    write_json(make_run_dir(config, run_dir) / "config.json", describe(saved))
    again = train.parse_options(line)
    assert (again.config, again.directory) == (saved, run_dir)
    assert "ppo.gamma" in capsys.readouterr().out  # the file's value is not used, and the user is told
    assert train.parse_options(["--resume", str(run_dir), "--ppo.gamma", "0.9"]).config.ppo.gamma == 0.9


# --- Config files ------------------------------------------------------------------------------------------------


def test_every_shipped_config_runs():
    for path in ROOT.glob("configs/*.py"):
        if path.stem.startswith("search_") and importlib.util.find_spec("optuna") is None:
            continue
        assert path.stem.endswith(load_config(path).name)


def test_reinforce_is_what_its_page_says():
    reinforce = load_config(ROOT / "configs" / "reinforce_qbert.py")
    ppo = reinforce.ppo
    assert (ppo.epochs, reinforce.num_minibatches, ppo.gae_lambda, ppo.entropy_coef) == (1, 1, 1.0, 0.0)
    assert (ppo.normalize_advantages, ppo.clip_value_loss) == (False, False)


UNUSABLE = {
    "x = 1": "get_config",
    "def get_config(): return 1": "int; expected Config",
    "from jaxrl_atari import *\ndef get_config(): return Config(seed=-1)": "seed = -1",
}
"""Text of a config file -> what the one line of error names."""


def test_an_unusable_config_file_is_named(tmp_path):
    for text, named in UNUSABLE.items():
        (tmp_path / "config.py").write_text(text)
        with pytest.raises(UserError) as error:
            load_config(tmp_path / "config.py")
        assert named in str(error.value)
        assert "\n" not in str(error.value)
