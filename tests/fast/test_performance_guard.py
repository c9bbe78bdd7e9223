"""Properties that make training fast, without a clock: compilations, transfers, and the form of the compiled
update."""

import contextlib
import dataclasses
import functools
import re
from collections import Counter, defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_atari import rollout
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.fast.by_hand import UNROLLED, chunk_size
from jaxrl_atari.groups import first_rollout_start
from jaxrl_atari.learner import compiled_update
from jaxrl_atari.network_forms import make_network
from jaxrl_atari.network_functions import empty_observation, init_params, make_module
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.ppo import PPO
from jaxrl_atari.random_rollout import random_rollout
from jaxrl_atari.session import iterations, open_session, place_session
from jaxrl_atari.update import init_train_state, update

ENVS, GROUPS, LENGTH = 4, 2, 8
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def jax_events():
    """What JAX traces and compiles inside the block: names of events -> seconds of each, as they come."""
    events = defaultdict(list)

    def listen(event, duration_secs, **_):
        events[event].append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def small(**values):
    return Config(
        env=EnvConfig(num_envs=ENVS, num_groups=GROUPS, num_threads=1),
        ppo=PPOConfig(rollout_length=LENGTH, minibatch_size=32, epochs=2, gae_lambda=0.9),
        devices=DevicesConfig(gpu=False),
        **values,
    )


def iterate(run, times):
    trained = iterations(run)
    for _ in range(times):
        next(trained)
    jax.block_until_ready(run.learner.state)


# --- Compilations ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(("overlap", "devices"), [("none", 1), ("update", 1), ("none", 2)])
def test_everything_is_compiled_once(overlap, devices, tmp_path):
    config = dataclasses.replace(small(overlap=overlap), devices=DevicesConfig(gpu=False, data_parallel=devices))
    compiled_update.cache_clear()  # other sessions of this process may have compiled it already
    with jax_events() as events, open_session(config, place_session(config), tmp_path / "session_0") as run:
        iterate(run, 2)
        assert events[COMPILED]
        before = run.learner.state.params["dense"]["kernel"]
        events.clear()
        iterate(run, 3)
        assert not events  # nothing is traced either
        assert devices > 1 or before.is_deleted()  # an update reuses the memory of the state
        run.finish()
    # Another session, in which all that enters the update as a number is another one.
    other = dataclasses.replace(config, ppo=jax.tree.map(lambda x: 0.9 * x, config.ppo))
    with (
        jax_events() as events,
        open_session(other, place_session(other), tmp_path / "session_1", session_number=1) as run,
    ):
        iterate(run, 2)
        run.finish()
    assert not events[COMPILED]


# --- Transfers ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_transfers_of_an_iteration(tmp_path, monkeypatch):
    """NumPy arrays that go to the device, by shapes in a call, and arrays that come back, in the steady state."""
    there, back = Counter(), Counter()

    def count(owner, name, calls, kind):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            moved = tuple(
                (leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args) if isinstance(leaf, kind)
            )
            calls.update([moved] if moved else [])
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    with open_session(small(), place_session(small()), tmp_path / "session_0") as run:
        iterate(run, 2)
        count(rollout, "act", there, np.ndarray)
        count(rollout, "begin_rollout", there, np.ndarray)
        count(jax, "device_put", there, np.ndarray)
        count(jax, "device_get", back, jax.Array)
        count(np, "asarray", back, jax.Array)
        iterate(run, 1)

    size = ENVS // GROUPS
    # The newest frame and its mark go there with each group and step, and once more for the value after the last.
    assert there.pop((((size, 84, 84), "uint8"), ((size,), "bool"))) == GROUPS * (LENGTH + 1)
    # Nothing else has frames, or goes there with each step.
    assert not [moved for moved in there if any(dtype == "uint8" for _, dtype in moved)]
    assert there.total() < LENGTH, there
    # The actions come back with each group and step, the metrics with each update, and nothing else.
    assert back.pop((((size,), "int32"),)) == GROUPS * LENGTH
    ((metrics, times),) = back.items()
    assert (set(metrics), times) == ({((), "float32")}, 1)


# --- The compiled update -----------------------------------------------------------------------------------------


def computations(hlo):
    """The computations of an HLO module: name -> lines. The entry computation is "ENTRY"."""
    found, name = {}, None
    for line in hlo.splitlines():
        if start := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = "ENTRY" if start[1] else start[2]
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name:
            found[name].append(line)
    return found


def convolutions_in_loops(hlo):
    """Lines with a convolution in the body of a loop, or in what a body calls."""
    found = computations(hlo)
    lines = [line for body in found.values() for line in body]
    waiting = [name for line in lines for name in re.findall(r"body=%?([\w.\-]+)", line)]
    assert waiting, "there is no loop in this program"
    reached = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += [word for line in found[name] for word in re.findall(r"%([\w.\-]+)", line) if word in found]
    return [line for name in reached for line in found[name] if re.search(r"= \S+ convolution\(", line)]


def update_and_arguments(network_config, device_class):
    """The update as training compiles it, and the shapes of what it takes for a small rollout."""
    length = 6 * LENGTH  # two minibatches, each of several chunks of the convolutions
    config = PPOConfig(rollout_length=length, minibatch_size=length * ENVS // 2, epochs=2, gae_lambda=0.95)
    assert 2 < config.minibatch_size / chunk_size("cpu", "float32") <= 3
    network = make_network(network_config, 6, device_class)
    key = jax.eval_shape(lambda: jax.random.key(0))
    data = jax.eval_shape(
        lambda key: random_rollout(key, network, length=length, num_envs=ENVS, num_actions=6), key
    )
    state = jax.eval_shape(
        lambda: init_train_state(
            init_params(make_module(network_config, 6, jnp.float32), jax.random.key(0)),
            config,
            PPO,
            jax.random.key(0),
        )
    )
    numbers = jax.tree.map(lambda _: jax.ShapeDtypeStruct((), jnp.float32), config)
    return jax.jit(functools.partial(update, apply=network.apply, algorithm=PPO)), (state, data, numbers, key)


def program_of_the_update(conv="auto"):
    """The text of the update compiled for this machine."""
    compiled, arguments = update_and_arguments(NetworkConfig(conv=conv), "cpu")
    return compiled.lower(*arguments).compile().as_text()


@pytest.mark.long
def test_no_convolution_in_a_loop_of_the_update():
    assert convolutions_in_loops(program_of_the_update()) == []
    assert len(convolutions_in_loops(program_of_the_update("plain"))) >= 3  # it finds them where they are


def test_the_update_moves_data_once():
    """What `fast/by_hand.py` says about fusion."""
    program = program_of_the_update()
    bodies = ["\n".join(lines) for lines in computations(program).values()]
    padded = [body for body in bodies if " pad(" in body]
    assert padded
    assert not [body for body in padded if " transpose(" in body]  # it would be repeated for every pad
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* concatenate\(.*?dimensions=\{(\d+)\}", program)
    images = [(shape.split(","), int(axis)) for shape, axis in shapes if shape.count(",") >= 3]
    assert images
    assert not [image for image in images if image[1] == len(image[0]) - 1]  # its operands would be copied first


def test_a_loop_over_chunks_reads_a_saved_output_before_it_takes_windows_of_it():
    network = make_network(NetworkConfig(compute_dtype="bfloat16"), 6, "cpu")
    params = jax.eval_shape(lambda: init_params(make_module(NetworkConfig(), 6, jnp.float32), jax.random.key(0)))
    samples = (UNROLLED + 1) * chunk_size("cpu", "bfloat16")
    stacks = jax.ShapeDtypeStruct((samples, 21, 21, 64), jnp.uint8)
    gradient = jax.jit(jax.grad(lambda params, stacks: network.apply(params, Observation(stacks)).value.sum()))
    found = computations(gradient.lower(params, stacks).compile().as_text())
    bodies = ["\n".join(lines) for lines in found.values()]
    windows = [body for body in bodies if re.search(r",9,9,4,128\]\S* concatenate\(", body)]
    assert windows
    assert not [body for body in windows if " dynamic-slice(" in body]


# --- What a GPU is given -----------------------------------------------------------------------------------------


def lowered_for_cuda(function, arguments):
    """The StableHLO that XLA would compile for a GPU; it takes none to make it."""
    return jax.export.export(function, platforms=["cuda"])(*arguments).mlir_module()


def test_the_update_of_a_gpu_has_its_convolutions_in_bfloat16_and_heads_in_float32():
    program = lowered_for_cuda(*update_and_arguments(NetworkConfig(compute_dtype="bfloat16"), "gpu"))
    convolutions = re.findall(r"stablehlo\.convolution\(.*?\) dim_numbers.*?-> tensor<\S+x(\w+)>", program)
    assert convolutions == ["bf16"] * (3 + 2 + 3)  # forward, gradients for inputs, gradients for weights
    products = re.findall(r"stablehlo\.dot_general .*?-> tensor<\S+x(\w+)>", program)
    assert Counter(products) == {"bf16": 3, "f32": 6}  # the dense layer; the two heads
    # True float32, not TF32, in the heads, forward and backward.
    assert len(re.findall(r"stablehlo\.dot_general [^\n]*precision = \[HIGHEST, HIGHEST\]", program)) == 6
    assert "custom_call" not in program  # nothing that calls back to the host


def test_the_matrix_products_of_a_gpu_have_their_dense_layer_and_heads_in_float32():
    """As the module that the form by hand computes: not in TF32."""
    config = NetworkConfig(conv="by_hand", compute_dtype="float32")
    program = lowered_for_cuda(*update_and_arguments(config, "gpu"))
    # The dense layer and the two heads, each forward and two gradients.
    assert len(re.findall(r"stablehlo\.dot_general [^\n]*precision = \[HIGHEST, HIGHEST\]", program)) == 9


def test_an_lstm_on_a_gpu_multiplies_in_float32():
    """Not in TF32, so that the policy that learns is the one that acted."""
    module = make_module(NetworkConfig(name="nature_lstm"), 6, jnp.bfloat16)
    network = make_network(NetworkConfig(name="nature_lstm"), 6, "gpu")
    params = jax.eval_shape(functools.partial(init_params, module), jax.random.key(0))
    program = lowered_for_cuda(jax.jit(network.apply), (params, jax.eval_shape(lambda: empty_observation(module))))
    products = re.findall(r"stablehlo\.dot_general [^\n]*-> tensor<\S+xf32>", program)
    assert len(products) >= 4  # two of the cell, two heads
    assert not [product for product in products if "precision = [HIGHEST, HIGHEST]" not in product]


def test_the_policy_of_a_gpu_does_not_call_the_host():
    network = make_network(NetworkConfig(), 6, "gpu")
    params = jax.eval_shape(lambda: init_params(make_module(NetworkConfig(), 6, jnp.float32), jax.random.key(0)))
    start = jax.eval_shape(lambda: first_rollout_start(ENVS, network.layout.shape))
    begin = functools.partial(rollout.begin_rollout, length=LENGTH)
    buffer = jax.eval_shape(begin, start)
    frame, first = jax.ShapeDtypeStruct((ENVS, 84, 84), jnp.uint8), jax.ShapeDtypeStruct((ENVS,), jnp.bool_)
    act = jax.jit(functools.partial(rollout.act.__wrapped__, network))
    program = lowered_for_cuda(act, (params, buffer, frame, first, jax.random.key(0), jnp.arange(ENVS)))
    assert program.count("stablehlo.convolution(") == 3
    assert "custom_call" not in program
