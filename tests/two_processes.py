"""A command in two processes that learn one session together (`devices.distributed`)."""

from user_commands import free_address, start

TINY = [
    "-m", "jaxrl_atari.train", "--total-env-steps", 256, "--env.game", "Breakout", "--env.num-envs", 4,
    "--env.num-threads", 1, "--env.max-frames", 128, "--ppo.rollout-length", 16, "--ppo.minibatch-size", 32,
    "--ppo.epochs", 1, "--log.every-env-steps", 64, "--log.checkpoint-every-env-steps", 128, "--log.no-graphs",
    "--log.no-tensorboard", "--devices.gpu", "false", "--devices.check", "--devices.data-parallel", "all",
]  # fmt: skip
"""The command that trains `small_training.TINY` on all devices of all processes."""


def distributed(coordinator, index, count=2):
    """The options of one process of several."""
    return ["--devices.distributed", "--devices.coordinator", coordinator, "--devices.num-processes", count,
            "--devices.process-index", index]  # fmt: skip


def output_of_both(children, status=0):
    """What two processes print, both of which end with this status."""
    try:
        printed = [child.communicate(timeout=280)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert [child.returncode for child in children] == [status] * 2, printed
    return printed


def together(*arguments, status=0):
    """The command in two processes; returns what each has printed."""
    coordinator = free_address()
    children = [start([*arguments, *distributed(coordinator, index)]) for index in range(2)]
    return output_of_both(children, status)
