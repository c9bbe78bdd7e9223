"""Two processes go on together or alone."""

import pytest
from sample_runs import read_csv
from small_training import flip_all
from two_processes import TINY, together
from user_commands import python

from jaxrl_atari.runs.checkpoints import Checkpoints


@pytest.mark.timeout(900)
def test_two_processes_go_on_together_or_alone_and_fall_back_from_a_damaged_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    together(*TINY, "--run-dir", run_dir)
    checkpoints = Checkpoints(run_dir / "session_0")
    before, last = checkpoints.env_steps()[-2:]
    flip_all(run_dir / "session_0", last, "arrays")
    resume = ("-m", "jaxrl_atari.train", "--resume", run_dir, "--total-env-steps")
    leader, follower = together(*resume, 384)
    assert f"checkpoints/{last}: damaged: " in leader
    assert f"resumed at {before:,} env steps" in leader
    assert "damaged" not in follower, "only process 0 logs"
    alone = python(*resume, 512, "--devices.no-distributed", "--devices.data-parallel", 1)
    assert alone.returncode == 0, alone.stderr
    steps = [int(row["env_steps"]) for row in read_csv(run_dir / "session_0" / "metrics.csv")]
    assert steps == sorted(set(steps))
    assert checkpoints.env_steps()[-1] == steps[-1] > 450
