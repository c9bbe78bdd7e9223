"""Properties that make training fast, without a clock: compilations, transfers, and the form of the compiled update."""

import contextlib
import dataclasses
import functools
import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_atari import ppo, rollout
from jaxrl_atari.benchmark.instruments import Compilations
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.fast.cpu_conv import UNROLLED, chunk_size
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.learner import compiled_update
from jaxrl_atari.networks import init_params
from jaxrl_atari.ppo import Hyperparameters, Rollout, init_train_state, update
from jaxrl_atari.session import prepare, train

ENVS, GROUPS, LENGTH = 4, 2, 8


def small(**values):
    return Config(
        env=EnvConfig(num_envs=ENVS, num_groups=GROUPS, num_threads=1),
        ppo=PPOConfig(rollout_length=LENGTH, minibatch_size=32, epochs=2),
        devices=DevicesConfig(gpu=False),
        **values,
    )


@pytest.fixture(params=["none", "update"])
def overlap(request):
    return request.param


def iterate(run, times):
    iterations = train(run)
    for _ in range(times):
        jax.block_until_ready(next(iterations))
    jax.block_until_ready(run.learner.settle())


@pytest.fixture
def open_run(tmp_path):
    with contextlib.ExitStack() as exits:
        yield lambda config: exits.enter_context(prepare(config, tmp_path / "session_0", quiet=True))


# --- Compilations ----------------------------------------------------------------------------------------------------


def test_everything_is_compiled_once(overlap, monkeypatch, open_run):
    traced = Counter()

    def counting(name, function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            traced[name] += 1  # only while JAX traces the function that calls it
            return function(*args, **kwargs)

        return counted

    monkeypatch.setattr(rollout, "sample_action", counting("act", rollout.sample_action))
    monkeypatch.setattr(ppo, "gae", counting("update", ppo.gae))
    compiled_update.cache_clear()  # other sessions of this process may have compiled it already
    run = open_run(small(overlap=overlap))
    with Compilations() as compilations:
        iterate(run, 2)
        assert compilations.count[Compilations.COMPILE] > 0  # the counter does see them
        assert traced["update"] == 1
        assert traced["act"] <= 1  # the other overlap's test may have traced it already
        compilations.count.clear()
        before = jax.tree.leaves(run.learner._state.params)
        iterate(run, 3)
        assert not compilations.count
        assert all(x.is_deleted() for x in before)  # an update reuses the memory of the state


@pytest.mark.parametrize(("overlap", "devices"), [("none", 1), ("update", 1), ("none", 2)])
def test_a_second_session_compiles_nothing(overlap, devices, tmp_path):
    config = dataclasses.replace(small(overlap=overlap), devices=DevicesConfig(gpu=False, data_parallel=devices))
    with prepare(config, tmp_path / "session_0", quiet=True) as run:
        iterate(run, 2)
        run.finish()
    other = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, learning_rate=1e-3, gae_lambda=0.5))
    with Compilations() as compilations, prepare(other, tmp_path / "session_1", session=1, quiet=True) as run:
        iterate(run, 2)
        run.finish()
    assert not compilations.count[Compilations.COMPILE]


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_a_step_of_the_policy_consumes_the_rollout_so_far(open_run):
    """Otherwise each step would copy it."""
    run = open_run(small())
    iterate(run, 1)
    group = run.groups[0][0]
    group.begin(jax.random.key(0))
    before = group._state.frames
    group.choose(run.learner.acting_params()[0])
    assert before.is_deleted()
    group.send()


# --- Transfers -------------------------------------------------------------------------------------------------------


def test_transfers_of_an_iteration(open_run, monkeypatch):
    """NumPy arrays that go to the device, by shapes in a call, and arrays that come back, in the steady state."""
    run = open_run(small())
    iterate(run, 2)
    there, back = Counter(), Counter()

    def counting(function, calls, kind):
        def counted(*args, **kwargs):
            moved = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args) if isinstance(leaf, kind))
            calls.update([moved] if moved else [])
            return function(*args, **kwargs)

        return counted

    for name in ("act", "begin_rollout"):
        monkeypatch.setattr(rollout, name, counting(getattr(rollout, name), there, np.ndarray))
    monkeypatch.setattr(jax, "device_put", counting(jax.device_put, there, (np.ndarray, np.generic)))
    monkeypatch.setattr(jax, "device_get", counting(jax.device_get, back, jax.Array))
    monkeypatch.setattr(np, "asarray", counting(np.asarray, back, jax.Array))
    iterate(run, 1)

    size = ENVS // GROUPS
    # The newest frame and its mark go there with each group and step, and once more for the value after the last.
    assert there.pop((((size, 84, 84), "uint8"), ((size,), "bool"))) == GROUPS * (LENGTH + 1)
    # Nothing else has frames, or goes there with each step.
    assert not [moved for moved in there if any(dtype == "uint8" for _, dtype in moved)]
    assert there.total() < LENGTH, there
    # The actions come back with each group and step, the metrics with each update, and nothing else.
    metrics = (((), "float32"),) * 8
    assert back == {(((size,), "int32"),): GROUPS * LENGTH, metrics: 1}


def implicit_transfer(run):
    """JAX's error about one."""
    try:
        jnp.add(run.learner.state.optimizer_steps, np.ones((), np.int32))
    except Exception as error:
        return str(error)
    return ""


def test_no_implicit_transfers(overlap, open_run):
    run = open_run(small(overlap=overlap))
    iterate(run, 2)
    before, caught = jax.config.jax_transfer_guard, []
    jax.config.update("jax_transfer_guard", "disallow")  # of all threads, the learner's too
    try:
        iterate(run, 2)
        planted = threading.Thread(target=lambda: caught.append(implicit_transfer(run)))
        planted.start()
        planted.join()
        assert "Disallowed host-to-device transfer" in caught[0]
    finally:
        jax.config.update("jax_transfer_guard", before or "allow")


# --- The compiled update ---------------------------------------------------------------------------------------------


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


def update_and_arguments(network_config, platform):
    """The update as training compiles it, and the shapes of what it takes for a small rollout."""
    length = 6 * LENGTH  # two minibatches, each of several chunks of the convolutions
    config = PPOConfig(rollout_length=length, minibatch_size=length * ENVS // 2, epochs=2)
    assert 2 < config.minibatch_size / chunk_size("cpu", "float32") <= 3
    network = make_network(network_config, 6, platform)
    per_step = jax.ShapeDtypeStruct((length, ENVS), jnp.float32)
    frames = jax.ShapeDtypeStruct((length + 4, ENVS, *network.layout.shape), jnp.uint8)
    whole = jax.ShapeDtypeStruct((length, ENVS), jnp.int32)
    marks = jax.ShapeDtypeStruct((length, ENVS), jnp.bool_)
    data = Rollout(
        frames, age=whole, action=whole, log_prob=per_step, value=per_step, reward=per_step, terminated=marks,
        truncated=marks, weight=per_step, bootstrap_value=jax.ShapeDtypeStruct((ENVS,), jnp.float32),
    )  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda: init_train_state(init_params(network_config, 6, jax.random.key(0)), config))
    hyper = Hyperparameters(*[jax.ShapeDtypeStruct((), jnp.float32)] * len(Hyperparameters._fields))
    return jax.jit(functools.partial(update, apply=network.apply, config=config)), (state, data, hyper, key)


def program_of_the_update(conv="auto"):
    """The text of the update compiled for this machine."""
    compiled, arguments = update_and_arguments(NetworkConfig(conv=conv), "cpu")
    return compiled.lower(*arguments).compile().as_text()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the slow path is XLA's CPU back end's")
def test_no_convolution_in_a_loop_of_the_update():
    assert convolutions_in_loops(program_of_the_update()) == []
    assert len(convolutions_in_loops(program_of_the_update("plain"))) >= 3  # it finds them where they are


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the compiled program is that of XLA's CPU back end")
def test_the_update_moves_data_once():
    """What `cpu_conv.py` says about fusion."""
    program = program_of_the_update()
    bodies = ["\n".join(lines) for lines in computations(program).values()]
    padded = [body for body in bodies if " pad(" in body]
    assert padded
    assert not [body for body in padded if " transpose(" in body]  # it would be repeated for every pad
    shapes = re.findall(r"= \w+\[([\d,]+)\]\S* concatenate\(.*?dimensions=\{(\d+)\}", program)
    images = [(shape.split(","), int(axis)) for shape, axis in shapes if shape.count(",") >= 3]
    assert images
    assert not [image for image in images if image[1] == len(image[0]) - 1]  # its operands would be copied first


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the compiled program is that of XLA's CPU back end")
def test_a_loop_over_chunks_reads_a_saved_output_before_it_takes_windows_of_it():
    network = make_network(NetworkConfig(compute_dtype="bfloat16"), 6, "cpu")
    params = jax.eval_shape(lambda: init_params(NetworkConfig(), 6, jax.random.key(0)))
    samples = (UNROLLED + 1) * chunk_size("cpu", "bfloat16")
    stacks = jax.ShapeDtypeStruct((samples, 21, 21, 64), jnp.uint8)
    gradient = jax.jit(jax.grad(lambda params, stacks: network.apply(params, stacks)[1].sum()))
    found = computations(gradient.lower(params, stacks).compile().as_text())
    bodies = ["\n".join(lines) for lines in found.values()]
    windows = [body for body in bodies if re.search(r",9,9,4,128\]\S* concatenate\(", body)]
    assert windows
    assert not [body for body in windows if " dynamic-slice(" in body]


# --- What a GPU is given ---------------------------------------------------------------------------------------------


def lowered_for_cuda(function, arguments):
    """The StableHLO that XLA would compile for a GPU; it takes none to make it."""
    return jax.export.export(function, platforms=["cuda"])(*arguments).mlir_module()


def test_the_update_of_a_gpu_has_its_convolutions_in_bfloat16_and_heads_in_float32():
    program = lowered_for_cuda(*update_and_arguments(NetworkConfig(), "gpu"))
    convolutions = re.findall(r"stablehlo\.convolution\(.*?\) dim_numbers.*?-> tensor<\S+x(\w+)>", program)
    assert convolutions == ["bf16"] * (3 + 2 + 3)  # forward, gradients for inputs, gradients for weights
    products = re.findall(r"stablehlo\.dot_general .*?-> tensor<\S+x(\w+)>", program)
    assert Counter(products) == {"bf16": 3, "f32": 6}  # the dense layer; the two heads
    # True float32, not TF32, in the heads, forward and backward.
    assert len(re.findall(r"stablehlo\.dot_general [^\n]*precision = \[HIGHEST, HIGHEST\]", program)) == 6
    assert "custom_call" not in program  # nothing that calls back to the host


def test_the_policy_of_a_gpu_does_not_call_the_host():
    network = make_network(NetworkConfig(), 6, "gpu")
    params = jax.eval_shape(lambda: init_params(NetworkConfig(), 6, jax.random.key(0)))
    state = jax.eval_shape(lambda: rollout.empty_state(LENGTH, ENVS, network.layout.shape))
    frame, first = jax.ShapeDtypeStruct((ENVS, 84, 84), jnp.uint8), jax.ShapeDtypeStruct((ENVS,), jnp.bool_)
    act = jax.jit(functools.partial(rollout.act.__wrapped__, network))
    program = lowered_for_cuda(act, (params, state, frame, first))
    assert program.count("stablehlo.convolution(") == 3
    assert "custom_call" not in program
