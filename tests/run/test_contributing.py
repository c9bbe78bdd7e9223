"""CONTRIBUTING.md, followed word for word: each idea is tried on a copy of the package."""

import csv
import re
import shutil
import subprocess
import sys

import pytest
from user_commands import ROOT, user_environment

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def row(idea):
    (row,) = re.findall(rf"^\| {idea} .*", PAGE, re.M)
    return row


def test_the_page_names_what_there_is():
    tests = "".join(path.read_text() for path in ROOT.glob("tests/*.py"))
    for name in set(re.findall(r"`(test_\w+)`", PAGE)):
        assert f"def {name}(" in tests
    for path in set(re.findall(r"`((?:jaxrl_atari|tests|docs)/[\w/.]+)`", PAGE)):
        assert (ROOT / path).exists(), path


class Copy:
    """A contributor's checkout."""

    def __init__(self, folder):
        for name in ("jaxrl_atari", "tests", "configs", "docs"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.folder = folder

    def edit(self, file, old, new):
        path = self.folder / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} has not once: {old}"
        path.write_text(text.replace(old, new))

    def insert(self, file, before, text):
        self.edit(file, before, text + before)

    def python(self, *arguments):
        environment = user_environment(PYTHONPATH=str(self.folder))
        return subprocess.run(
            [sys.executable, "-m", *arguments], cwd=self.folder, env=environment, capture_output=True, text=True
        )

    def test(self, idea, chosen):
        """The quick ones of the tests that the row of an idea names: those that failed and those that passed."""
        files = sorted(set(re.findall(r"tests/test_\w+\.py", row(idea))))
        output = self.python("pytest", "-v", "-n", "0", "-k", chosen, *files).stdout
        outcomes = re.findall(r"::(\w+)\S* (FAILED|PASSED)", output)
        assert outcomes, output
        return ({name for name, outcome in outcomes if outcome == word} for word in ("FAILED", "PASSED"))

    def train(self, *options):
        """Trains for a moment; returns the last row of metrics.csv, or the error."""
        small = (
            "--env.num-envs 2 --ppo.rollout-length 8 --ppo.minibatch-size 16 --total-env-steps 48 --log.no-graphs"
        )
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        ended = self.python("jaxrl_atari.train", "--run-dir", "run", *small.split(), *options)
        if ended.returncode:
            return ended.stderr
        *_, last = csv.DictReader((self.folder / "run" / "session_0" / "metrics.csv").read_text().splitlines())
        return last


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


@pytest.mark.long
def test_another_loss_with_a_coefficient(copy):
    field = """\
    logit_coef: Annotated[float, Limits(0.0, 1.0), TRACED] = 0.25
    \"""Weight of the mean square of the logits.\"""
"""
    copy.insert("jaxrl_atari/config.py", "    value_coef: Annotated[", field)
    term = "    loss += options.logit_coef * mean(jnp.sum(jnp.square(logits), axis=-1))\n"
    copy.insert("jaxrl_atari/ppo.py", "    outside = jnp.abs(ratio - 1.0)", term)
    chosen = "float64 or all_parameters or normalized or another_shape"
    failed, passed = copy.test("another loss of PPO", chosen)
    assert failed == {"test_loss_and_its_gradients_in_float64", "test_gradients_of_all_parameters"}
    (by_design,) = re.findall(r"^- \*\*A term in the loss\.\*\*(.*?)^- ", PAGE, re.M | re.S)
    assert all(f"`{name}`" in by_design for name in failed)
    assert len(passed) == 2
    term = """\
    parts["loss"] += 0.25 * (share * (logits**2).sum(-1)).sum()
    d_logits += 0.5 * share[:, None] * logits
"""
    copy.insert("tests/reference.py", "    return parts, d_logits, d_value\n", term)
    failed, passed = copy.test("another loss of PPO", chosen)
    assert (failed, len(passed)) == (set(), 4)


NETWORK = '''
class Small(nn.Module):
    """A network of a contributor: 339,079 parameters with 6 actions."""

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        x = stacks[..., ::2, ::2, :].astype(self.dtype) / 255
        x = nn.relu(dense(48, 1.0, "dense", self.dtype)(x.reshape(*x.shape[:-3], -1))).astype(jnp.float32)
        return heads(x, self.num_actions)


'''


@pytest.mark.long
def test_another_network(copy):
    copy.insert(
        "jaxrl_atari/registry.py", '        "nature": ', '        "small": "jaxrl_atari.networks:Small",\n'
    )
    copy.insert("jaxrl_atari/networks.py", "# --- Recurrent ---", NETWORK)
    failed, passed = copy.test("a network that is shipped", "small")
    assert failed == set()
    assert len(passed) >= 4
    assert copy.train("--network.name", "small")["env_steps"] == "48"
    # A value [N, 1] would broadcast against the target.
    copy.edit(
        "jaxrl_atari/networks.py",
        "Outputs(logits, value[..., 0], carry, features)",
        "Outputs(logits, value, carry)",
    )
    failed, _ = copy.test("a network that is shipped", "shapes and small")
    assert failed == {"test_shapes_and_types_of_the_outputs"}
    assert "value of network Small = 'float32[2, 1]': expected float32[2]" in copy.train("--network.name", "small")


@pytest.mark.slow
def test_another_metric(copy):
    copy.insert("jaxrl_atari/ppo.py", '        "entropy": entropy,\n', '        "mean_ratio": mean(ratio),\n')
    column = '    "mean_ratio": Column("losses", "", "mean probability ratio"),\n'
    copy.insert("jaxrl_atari/runs/columns.py", '    "entropy": Column(', column)
    copy.insert(
        "docs/metrics.md", "| `entropy` |", "| `mean_ratio` | | mean over updates of mean(ratio) | near 1 |\n"
    )
    failed, passed = copy.test("the unit, section and place of a metric", "float64 or column or csv")
    assert failed == set()
    assert len(passed) > 2
    assert float(copy.train()["mean_ratio"]) == pytest.approx(1.0, abs=0.1)
