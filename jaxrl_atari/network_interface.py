"""What a network is: a `flax.linen.Module`; and `Network`, the pure functions that the rest of the package uses.

A module is here called a network if it has:

**Fields**, which the package sets. Further fields have defaults, and values that can be hashed.

    num_actions    A, of the game
    dtype          type of the torso's products, float32 or bfloat16; parameters are float32

**A call**, `module(stacks)`, with frame stacks uint8 [N, 84, 84, 4], the oldest frame first. It returns `Outputs`,
or a pair: logits float32 [N, A] and value float32 [N]. A tuple of three is refused: further outputs are named, as
in `Outputs(logits, value, features=x)`. A logit of -1e9 rules an action out; -inf would make the entropy NaN.

**Parameters**, and no other variables: layers with statistics or random numbers, such as batch normalisation,
spectral normalisation and dropout, are refused. Layer and group normalisation work.

**A memory**, if it is recurrent: a method `initial_carry(num_envs)` returns what it remembers before the first
game, any pytree [num_envs, ...]. Its call is `module(stacks, first, carry)`, the fields of an `Observation`, and
returns `Outputs` with the new carry.

`networks.py` has those that are shipped, and `register_network` adds one of your own (docs/idea.md, "A network").
`network_functions.py` makes pure functions of a module, and checks what it returns. `network_forms.py` makes a
`Network` of them, in the form that suits its devices.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

from jaxrl_atari.errors import require
from jaxrl_atari.frames import FrameLayout
from jaxrl_atari.registry import NETWORKS


class Observation(NamedTuple):
    """Input of a network: N samples.

    A recurrent network gets N / n consecutive steps of n environments, ordered by step, then by environment.
    """

    stacks: jax.Array
    """uint8 [N, H, W, 4 * C] in the network's layout, the oldest frame first; in `frames.PLAIN` [N, 84, 84, 4]."""
    first: jax.Array | None = None
    """bool [N]: a game starts here. Only a recurrent network needs it."""
    carry: Any = ()
    """[n, ...]: the memory of each environment before its first step here."""


class Outputs(NamedTuple):
    """Output of a network for an `Observation`."""

    logits: jax.Array
    """float32 [N, A], of a categorical distribution over the actions."""
    value: jax.Array
    """float32 [N]."""
    carry: Any = ()
    """[n, ...]: the memory of each environment after its last step here."""
    features: jax.Array | None = None
    """[N, F]: the input of the heads, where a network gives it."""
    extra: Any = ()
    """Any pytree of arrays [N, ...]: what else a loss of your own needs, such as a second value."""


Apply = Callable[[Any, Observation], Outputs]
"""A network as a pure function: parameters, observation -> outputs."""


def is_recurrent(carry: Any) -> bool:
    """Whether a carry is that of a recurrent network: it holds an array."""
    return bool(jax.tree.leaves(carry))


class Network(NamedTuple):
    """A network as the rest of the package knows it: pure functions that suit the devices which compute it."""

    init: Callable[[jax.Array], Any]
    """Key -> its first parameters, as `init_params` makes them."""
    apply: Apply
    """Parameters, observation -> outputs."""
    layout: FrameLayout
    """How frames are stored: `Observation.stacks` is uint8 [N, H, W, 4 * C]."""
    for_acting: Callable[[Any], Any]
    """Parameters -> parameters that `apply` reads faster: for acting, not for learning."""
    dtype: Any
    """Type of the torso's arithmetic."""
    initial_carry: Callable[[int], Any] = lambda num_envs: ()
    """Number of environments -> the memory before their first game, [num_envs, ...]."""


def register_network(name: str, network: Callable[..., nn.Module]) -> None:
    """Lets a config choose a network of your own, as in `--network.name tiny`.

    Args:
        name: a new name. A later network of the same name replaces the earlier one.
        network: a class of modules, as the top of this file describes them; or a `functools.partial` of one that
            sets fields of its own.

    Raises:
        ConfigError: the name has other characters than letters, digits and `._-`, or is taken by the package; or
            `network` is a module and no class.
    """
    usable = callable(network) and not isinstance(network, nn.Module)
    require(usable, NETWORKS.field, name, "a class of modules, such as Tiny and not Tiny(...)", f"got {network!r}")
    NETWORKS.register(name, network)
