"""Policies to export, and the check of what their exported programs compute."""

import dataclasses
from functools import partial

import jax
import numpy as np

from jaxrl_atari import make_env
from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.export.folder import run_jax, run_onnx
from jaxrl_atari.networks import make_network


def with_network(policy, name):
    """The policy with another network's first parameters. Its logits are scaled so that no action is the best one
    everywhere."""
    config = dataclasses.replace(policy.config, network=NetworkConfig(name=name, compute_dtype="float32"))
    network = make_network(config.network, policy.num_actions, "cpu")
    params = network.init(jax.random.key(3))
    policy = dataclasses.replace(policy, config=config, network=network, params=params)
    env = make_env(config)
    stacks = np.stack([env.reset(seed=11)[0], *(env.step(step % 4)[0] for step in range(20))])
    carry = policy.initial_carry(len(stacks))
    logits = policy.decide(stacks, np.ones(len(stacks), bool), carry, greedy=True).outputs.logits
    scale = 1 / np.abs(logits - logits.mean(0)).max()
    head = {"kernel": scale * params["policy"]["kernel"], "bias": -scale * logits.mean(0)}
    return dataclasses.replace(policy, params={**params, "policy": head})


def check_programs(policy, folder):
    """Compares the programs of an export with what the policy computes, in the form in which a CPU trains.

    For batches of 1 and 3 environments, and several steps, with a game that starts among them, for a network with
    a memory.
    """
    programs = [partial(run_jax, (folder / "policy.jaxexport").read_bytes())]
    if (folder / "policy.onnx").exists():
        programs.append(partial(run_onnx, (folder / "policy.onnx").read_bytes()))
    random = np.random.default_rng(0)
    for size in (1, 3):
        carry = policy.initial_carry(size)
        memories = [jax.tree.leaves(jax.device_get(carry))] * len(programs)
        for step in range(3):
            stacks = random.integers(0, 256, (size, 84, 84, 4), np.uint8)
            first = np.arange(size) == step - 1
            expected = policy.decide(stacks, first, carry, greedy=True).outputs
            carry = expected.carry
            assert np.ptp(expected.logits) > 0.1, "nearly equal: this test tests little"
            found = [
                run([stacks, first, *memory] if memory else [stacks])
                for run, memory in zip(programs, memories, strict=True)
            ]
            for outputs in found:
                for ours, theirs in zip(outputs, jax.tree.leaves(expected[:3]), strict=True):
                    assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
            memories = [outputs[2:] for outputs in found]
