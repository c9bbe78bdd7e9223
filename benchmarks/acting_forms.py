"""Forms of acting, in turns: groups of environments, pinned emulator threads, and ale-py's `xla()`.

    python benchmarks/acting_forms.py --config configs/qbert.py [--rounds 5] [--seconds 4] [--env.num-envs 48 ...]

With `xla()` the emulators' step is a call inside a compiled program, so a whole rollout is one `lax.scan`, and the
program itself waits for the emulators. In their first rollout all forms choose the same actions, up to the rounding of
sums, which the output reports.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from jax import lax

from jaxrl_atari.config import Config
from jaxrl_atari.envs import ale
from jaxrl_atari.hardware import runtime
from jaxrl_atari.rollout import act, begin_rollout, collect
from jaxrl_atari.session import Session, prepare
from jaxrl_atari.train import parse


def host_form(run: Session) -> Callable[[jax.Array], tuple[int, jax.Array]]:
    """Key -> env steps of a rollout as training takes it, and its actions [T, B]."""

    def collected(key: jax.Array) -> tuple[int, jax.Array]:
        result = collect(run.groups, run.learner.acting_params(), key)
        return result.env_steps, result.rollouts[0].action

    return collected


def xla_form(run: Session) -> Callable[[jax.Array], tuple[int, jax.Array]]:
    """The same in one program; `run` has one group on one device."""
    ((group,),) = run.groups
    handle, _, env_step = group.pool._envs.xla()  # pyright: ignore[reportAttributeAccessIssue]
    network, length = group._network, group.rollout_length

    @partial(jax.jit, donate_argnums=0)
    def rollout(state, handle, frame, first, params, key):
        def step(carry, _):
            state, handle, frame, first = carry
            state, action = act(network, params, state, frame, first)
            handle, (frame, reward, terminated, truncated, info) = env_step(handle, action)
            first_next = terminated | truncated
            return (state, handle, frame[:, 0], first_next), (reward, terminated, truncated, info["lives"], first)

        carry, outcome = lax.scan(step, (begin_rollout(state, key), handle, frame, first), None, length)
        state, handle, frame, first = carry
        full, _ = act(network, params, state, frame, first)  # for the bootstrap value
        return full, handle, frame, first, outcome

    state, frame, first = group._state, jnp.asarray(group._newest.frame), jnp.asarray(group._newest.first)

    def collected(key: jax.Array) -> tuple[int, jax.Array]:
        nonlocal state, handle, frame, first
        (params,) = run.learner.acting_params()
        state, handle, frame, first, outcome = rollout(state, handle, frame, first, params, key)
        starts = np.concatenate([outcome[4][1:], first[None]])
        return int((~starts).sum()), state.action[:length]

    return collected


def main() -> None:
    """Prints env steps a second of each form, and the ratio to the first one in each round."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    options, rest = parser.parse_known_args()
    config, _ = parse(rest)
    runtime.configure()
    forms = {"1 group": (1, host_form, -1), "1 group, pinned": (1, host_form, 0), "xla()": (1, xla_form, -1)}
    forms |= {f"{n} groups": (n, host_form, -1) for n in (2, 3, 4) if config.env.num_envs % n == 0}
    sides = {}
    expected = np.array(0)
    with contextlib.ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory()))
        for name, (groups, form, offset) in forms.items():
            ale.AtariVectorEnv = partial(AtariVectorEnv, thread_affinity_offset=offset)
            env = dataclasses.replace(config.env, num_groups=groups)
            grouped: Config = dataclasses.replace(config, env=env)
            run = exits.enter_context(prepare(grouped, folder / name, quiet=True))
            key = jax.random.key(config.seed)  # now that `prepare` has limited JAX to the config's devices
            try:
                sides[name] = form(run)
                actions = np.asarray(sides[name](key)[1])
                sides[name](key)  # the first rollout's outputs, as inputs, may compile once more
            except Exception as error:
                if name == "1 group":  # the form to which the others are compared
                    raise
                print(f"{name:16} failed: {type(error).__name__}: {error}")
                sides.pop(name, None)
                continue
            expected = actions if name == "1 group" else expected
            share = (actions == expected).mean()
            print(f"{name:16} {share:7.2%} of the first rollout's actions are those of 1 group")
        sps: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                env_steps, start = 0, time.perf_counter()
                while time.perf_counter() - start < options.seconds:
                    taken, actions = side(key)
                    jax.block_until_ready(actions)
                    env_steps += taken
                sps[name].append(env_steps / (time.perf_counter() - start))
    for name, values in sps.items():
        ratios = [a / b for a, b in zip(values, sps["1 group"], strict=True)]
        print(
            f"{name:16} {statistics.median(values):8,.0f} SPS ({min(values):,.0f} to {max(values):,.0f});"
            f" {statistics.median(ratios):.2f} times 1 group ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(json.dumps({"config": config.to_dict(), "sps": sps}))


if __name__ == "__main__":
    main()
