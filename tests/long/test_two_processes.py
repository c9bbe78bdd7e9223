"""Two real processes that learn one session together, over gloo."""

import json

import jax
import numpy as np
from sample_runs import read_csv
from simulated_gpus import simulated, starts
from two_processes import TINY, output_of_both, together
from user_commands import free_address, python, start

from jaxrl_atari.evaluate.policy import load_policy


def test_two_processes_learn_what_one_learns(trained, tmp_path):
    run_dir = tmp_path / "run"
    leader, follower = together(*TINY, "--devices.actor", "auto", "--run-dir", run_dir)
    assert "env_steps " in leader
    assert "games are not recorded with devices.distributed" in leader
    assert "session 0" not in follower, "only process 0 logs"
    rows, expected = (read_csv(path / "session_0" / "metrics.csv") for path in (run_dir, trained("two devices")))
    assert int(rows[-1]["episodes"]) >= 4, "the games of both processes"
    for name in ("env_steps", "episodes", "return_mean", "episode_length", "learning_rate"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name
    learned = [jax.tree.leaves(load_policy(path, "latest").params) for path in (run_dir, trained("two devices"))]
    for here, there in zip(*learned, strict=True):
        assert np.sqrt(np.mean(np.square(here - there))) < 1e-5  # Adam can have gone 1e-3


TOGETHER = """
from sys import argv
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import place
from jaxrl_atari.hardware.distributed import *
from jaxrl_atari.imports import import_inherited
import_inherited()
devices = DevicesConfig(
    data_parallel="all", distributed=True, coordinator=argv[1], num_processes=2, process_index=int(argv[2])
)
join_processes(devices)
items = gather_items([(2**24 + 1, 0.1, argv[2])] * (2 + 3 * int(argv[2])))
placement = place(devices)
ids = [device.id for device in (*placement.learner, *placement.actors, placement.evaluator)]
text = agree(argv[2] * 9_000)  # longer than one page
print("placed", is_leader(), text[0], len(text), sum_over_processes(4), items, *ids, flush=True)
"""


def test_two_processes_on_one_host_have_gpus_of_their_own():
    coordinator = free_address()
    printed = "".join(
        output_of_both([
            start(["-c", TOGETHER, coordinator, i], **simulated(2), CUDA_VISIBLE_DEVICES=str(i)) for i in range(2)
        ])
    )  # fmt: skip
    lines = [line for line in printed.splitlines() if line.startswith("placed")]  # Gloo prints as well
    items = [[16_777_217, 0.1, "0"]] * 2 + [[16_777_217, 0.1, "1"]] * 5  # float32 has neither number
    # JAX numbers the CPU devices of process 1 from 2048 on; the first one of each process is the CPU.
    assert lines == [
        f"placed True 0 9000 8 {items} 1 2049 1 0",
        f"placed False 0 9000 8 {items} 1 2049 2049 2048",
    ], printed


JOIN = """
import json, os, sys
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.distributed import join_processes
from jaxrl_atari.imports import import_inherited
import_inherited()
for variables, options in json.loads(sys.argv[1]):
    os.environ |= variables
    try:
        join_processes(DevicesConfig(distributed=True, **options))
        from jaxrl_atari.devices import place
        print(place(DevicesConfig(distributed=True, **options)).learner)
    except UserError as error:
        print(error)
"""


def join(*cases, **variables):
    """What a process prints that tries to be one of several, each time with other variables and options."""
    return python("-c", JOIN, json.dumps(cases), **variables).stdout.splitlines()


def test_a_process_of_several_starts_its_gpus_and_does_not_train_on_the_cpu_alone(tmp_path):
    """All that it sees, whatever a cluster manager says, or those of JAX_LOCAL_DEVICE_IDS."""
    address = free_address()
    cluster = {"OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{address}", "OMPI_COMM_WORLD_SIZE": "1",
               "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # fmt: skip
    options = {"gpu": True, "coordinator": address, "num_processes": 1, "process_index": 0}
    for ids, gpus in (("", "0,1"), ("1", "1")):
        record = tmp_path / f"record{ids}"
        variables = {"CUDA_VISIBLE_DEVICES": "1,3", "JAX_LOCAL_DEVICE_IDS": ids, "SIMULATED_RECORD": str(record)}
        join(({}, options), **simulated(4, **variables, **({} if ids else cluster)))
        assert starts(record)[0]["gpus"] == gpus
    *_, refusal = join(({}, options | {"gpu": "auto"}), **simulated(2, SIMULATED_ERROR="INTERNAL: broken"))
    assert refusal.startswith("devices.distributed: JAX cannot start on GPU 0 (GPU-0), GPU 1")
    assert "INTERNAL: broken" in refusal
