"""What makes training fast, without a clock: compilations, transfers, and the form of the compiled update."""

import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_atari import learner, rollout
from jaxrl_atari.benchmark.instruments import Compilations
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, PPOConfig
from jaxrl_atari.devices import place
from jaxrl_atari.ppo import Hyperparameters, Rollout, init_train_state, make_update
from jaxrl_atari.trainer import Trainer, make_network

ENVS, GROUPS, LENGTH = 4, 2, 8


def small(length=LENGTH, **values):
    return Config(
        env=EnvConfig(num_envs=ENVS, num_groups=GROUPS, num_threads=1),
        ppo=PPOConfig(rollout_length=length, minibatch_size=32, epochs=2),
        devices=DevicesConfig(gpu=False),
        **values,
    )


@pytest.fixture(params=["none", "update"])
def overlap(request):
    return request.param


def iterate(trainer, times):
    for _ in range(times):
        jax.block_until_ready(trainer.iterate())
    jax.block_until_ready(trainer.settle())


def make_trainer(config, request):
    trainer = Trainer(config, 0, place(config.devices))
    request.addfinalizer(trainer.close)
    return trainer


# --- Compilations ----------------------------------------------------------------------------------------------------


def test_update_and_policy_are_traced_once(overlap, monkeypatch, request):
    traced = Counter()

    def counting(name, function):
        def counted(*args, **kwargs):
            traced[name] += 1  # jit calls this only when it traces
            return function(*args, **kwargs)

        return counted

    def make_counting_update(*args):
        update = make_update(*args)
        return update._replace(update=counting("update", update.update))

    monkeypatch.setattr(rollout, "act", counting("act", rollout.act))
    monkeypatch.setattr(rollout, "begin_rollout", counting("begin", rollout.begin_rollout))
    monkeypatch.setattr(learner, "make_update", make_counting_update)
    iterate(make_trainer(small(overlap=overlap), request), 4)
    assert traced == {"act": 1, "begin": 1, "update": 1}


def test_nothing_is_compiled_or_traced_after_two_iterations(overlap, request):
    trainer = make_trainer(small(overlap=overlap), request)
    with Compilations() as compilations:
        iterate(trainer, 2)
        assert compilations.count[Compilations.COMPILE] > 0  # the counter does see them
        compilations.count.clear()
        iterate(trainer, 3)
        assert not compilations.count


# --- Transfers -------------------------------------------------------------------------------------------------------


def transfers(length, request, monkeypatch):
    """What one iteration in the steady state moves: NumPy arrays to the device, by shapes in a call, and back."""
    trainer = make_trainer(small(length), request)
    iterate(trainer, 2)
    there, back = [], []

    def listing(function, calls, kind):
        def listed(*args, **kwargs):
            moved = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(args) if isinstance(leaf, kind))
            calls.extend([moved] if moved else [])
            return function(*args, **kwargs)

        return listed

    with monkeypatch.context() as patch:
        for name in ("act", "begin"):
            for actor in trainer.actors[0]:
                function = listing(getattr(actor._functions, name), there, np.ndarray)
                patch.setattr(actor, "_functions", actor._functions._replace(**{name: function}))
        patch.setattr(jax, "device_put", listing(jax.device_put, there, (np.ndarray, np.generic)))
        patch.setattr(jax, "device_get", listing(jax.device_get, back, jax.Array))
        patch.setattr(np, "asarray", listing(np.asarray, back, jax.Array))
        iterate(trainer, 1)
    return Counter(there), Counter(back)


def test_transfers_of_a_step(request, monkeypatch):
    there, back = transfers(LENGTH, request, monkeypatch)
    size = ENVS // GROUPS
    newest_frames = (((size, 84, 84), "uint8"), ((size,), "bool"))
    # The newest frame and its mark go there with each group and step, and once more for the value after the last.
    assert there[newest_frames] == GROUPS * (LENGTH + 1)
    frames = [count for moved, count in there.items() if any(dtype == "uint8" for _, dtype in moved)]
    assert sum(frames) == there[newest_frames]
    # The actions come back with each group and step, and nothing else.
    assert back == {(((size,), "int32"),): GROUPS * LENGTH}

    longer_there, longer_back = transfers(2 * LENGTH, request, monkeypatch)
    assert longer_there.total() - there.total() == GROUPS * LENGTH
    assert longer_back.total() - back.total() == GROUPS * LENGTH


def implicit_transfer(trainer):
    """What JAX says to one."""
    try:
        jnp.add(trainer.learner.state.optimizer_steps, np.ones((), np.int32))
    except Exception as error:
        return str(error)
    return ""


def test_no_implicit_transfers(overlap, request):
    trainer = make_trainer(small(overlap=overlap), request)
    iterate(trainer, 2)
    before, caught = jax.config.jax_transfer_guard, []
    jax.config.update("jax_transfer_guard", "disallow")  # of all threads, the learner's too
    try:
        iterate(trainer, 2)
        planted = threading.Thread(target=lambda: caught.append(implicit_transfer(trainer)))
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


def update_and_arguments(config, network):
    """The update as the trainer has it, and the shapes of what it takes for a small rollout."""
    length = 2 * LENGTH  # several minibatches, each of several chunks of the convolutions
    per_step = jax.ShapeDtypeStruct((length, ENVS), jnp.float32)
    frames = jax.ShapeDtypeStruct((length + 4, ENVS, 21, 21, 16), jnp.uint8)
    whole = jax.ShapeDtypeStruct((length, ENVS), jnp.int32)
    marks = jax.ShapeDtypeStruct((length, ENVS), jnp.bool_)
    data = Rollout(
        frames, age=whole, action=whole, log_prob=per_step, value=per_step, reward=per_step, terminated=marks,
        truncated=marks, weight=per_step, bootstrap_value=jax.ShapeDtypeStruct((ENVS,), jnp.float32),
    )  # fmt: skip
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda: init_train_state(network, config.ppo, jax.random.key(0)))
    hyper = Hyperparameters(*[jax.ShapeDtypeStruct((), jnp.float32)] * len(Hyperparameters._fields))
    return jax.jit(make_update(network, config.ppo).update), (state, data, hyper, key)


def compiled_update(conv="auto"):
    """The text of the update compiled for this machine."""
    network = make_network(small(), 6, "cpu")
    update, arguments = update_and_arguments(small(), network if conv == "auto" else network.clone(conv=conv))
    return update.lower(*arguments).compile().as_text()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the slow path is XLA's CPU back end's")
def test_no_convolution_in_a_loop_of_the_update():
    assert convolutions_in_loops(compiled_update()) == []
    assert len(convolutions_in_loops(compiled_update("plain"))) >= 3  # it finds them where they are


# --- What a GPU is given ---------------------------------------------------------------------------------------------


def lowered_for_cuda(function, arguments):
    """The StableHLO that XLA would compile for a GPU; it takes none to make it."""
    return jax.export.export(function, platforms=["cuda"])(*arguments).mlir_module()


def test_the_update_of_a_gpu_has_its_convolutions_in_bfloat16_and_heads_in_float32():
    config = small()
    network = make_network(config, 6, "gpu")
    program = lowered_for_cuda(*update_and_arguments(config, network))
    convolutions = re.findall(r"stablehlo\.convolution\(.*?\) dim_numbers.*?-> tensor<\S+x(\w+)>", program)
    assert convolutions == ["bf16"] * (3 + 2 + 3)  # forward, gradients for inputs, gradients for weights
    products = re.findall(r"stablehlo\.dot_general .*?-> tensor<\S+x(\w+)>", program)
    assert Counter(products) == {"bf16": 3, "f32": 6}  # the dense layer; the two heads
    assert "custom_call" not in program  # nothing that calls back to the host


def test_the_policy_of_a_gpu_does_not_call_the_host():
    config = small()
    network = make_network(config, 6, "gpu")
    params = jax.eval_shape(lambda: init_train_state(network, config.ppo, jax.random.key(0))).params
    state = jax.eval_shape(lambda: rollout.empty_actor_state(LENGTH, ENVS))
    frame, first = jax.ShapeDtypeStruct((ENVS, 84, 84), jnp.uint8), jax.ShapeDtypeStruct((ENVS,), jnp.bool_)
    program = lowered_for_cuda(rollout.make_actor_functions(network).act, (params, state, frame, first))
    assert program.count("stablehlo.convolution(") == 3
    assert "custom_call" not in program
