"""PPO on Atari in float64 NumPy, worked out from the papers: the oracle of `test_ppo.py`. Imports nothing of ours.

Sources: Mnih et al. 2015 (the network), Schulman et al. 2016, arXiv:1506.02438 (GAE), Schulman et al. 2017,
arXiv:1707.06347 (the loss), Kingma and Ba 2015, arXiv:1412.6980 (Adam), Pascanu et al. 2013 (norm clipping). The
gradients are derived by hand. Parameters are a dict of layers, each `{"kernel", "bias"}`; kernels [h, w, in, out].
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

STRIDES = {"conv1": 4, "conv2": 2, "conv3": 1}


def _patches(x, size, stride):
    """[N, H, W, C] -> [N, h, w, size * size * C], the receptive fields (im2col)."""
    windows = sliding_window_view(x, (size, size), axis=(1, 2))[:, ::stride, ::stride]
    n, h, w = windows.shape[:3]
    return windows.transpose(0, 1, 2, 4, 5, 3).reshape(n, h, w, -1)


def _scatter(d_patches, shape, size, stride):
    """The transpose of `_patches`: every pixel receives the sum over the fields that it lies in."""
    d_x = np.zeros(shape)
    n, h, w = d_patches.shape[:3]
    d_patches = d_patches.reshape(n, h, w, size, size, shape[-1])
    for i in range(size):
        for j in range(size):
            d_x[:, i : i + stride * h : stride, j : j + stride * w : stride] += d_patches[:, :, :, i, j]
    return d_x


def forward(params, stacks):
    """Frame stacks [N, 84, 84, 4] -> logits [N, A], value [N], and what `backward` needs.

    The last entry of that is how near a unit came to ReLU's kink: float32 may take the other side at about 1e-7.
    """
    x = np.asarray(stacks, np.float64) / 255.0
    layers, margins = {}, []

    def layer(name, rows):
        kernel = params[name]["kernel"]
        return rows @ kernel.reshape(-1, kernel.shape[-1]) + params[name]["bias"]

    def relu(before):
        margins.append(np.abs(before).min())
        return np.maximum(before, 0.0)

    for name, stride in STRIDES.items():
        shape, fields = x.shape, _patches(x, len(params[name]["kernel"]), stride)
        x = relu(layer(name, fields))
        layers[name] = shape, fields, x
    flat = x.reshape(len(x), -1)
    features = relu(layer("dense", flat))
    return layer("policy", features), layer("value", features)[:, 0], (layers, flat, features, min(margins))


def backward(params, cache, d_logits, d_value):
    """Gradients of all parameters from those of the outputs.

    ReLU passes a gradient where its output is positive.
    """
    layers, flat, features, _ = cache
    gradients = {}

    def dense(name, inputs, d_outputs):
        """Notes the gradients of a dense layer; returns that of its inputs."""
        gradients[name] = {"kernel": inputs.T @ d_outputs, "bias": d_outputs.sum(0)}
        return d_outputs @ params[name]["kernel"].T

    d_features = dense("policy", features, d_logits) + dense("value", features, d_value[:, None])
    d_x = dense("dense", flat, d_features * (features > 0))
    for name in reversed(STRIDES):
        kernel = params[name]["kernel"]
        shape, fields, x = layers[name]
        d_y = d_x.reshape(x.shape) * (x > 0)
        rows = d_y.reshape(-1, kernel.shape[-1])
        weight_gradient = fields.reshape(len(rows), -1).T @ rows
        gradients[name] = {"kernel": weight_gradient.reshape(kernel.shape), "bias": rows.sum(0)}
        d_fields = d_y @ kernel.reshape(-1, kernel.shape[-1]).T
        d_x = _scatter(d_fields, shape, kernel.shape[0], STRIDES[name])
    return gradients


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def advantages(rollout, gamma, gae_lambda):
    """GAE as the double sum A_t = sum_l (gamma lambda)^l delta_{t+l}, to the end of the game or the rollout."""
    reward, value, terminated = (rollout[name] for name in ("reward", "value", "terminated"))
    steps, num_envs = reward.shape
    result = np.zeros((steps, num_envs))
    for b in range(num_envs):
        for t in range(steps):
            for ahead in range(steps - t):
                k = t + ahead
                beyond = rollout["bootstrap_value"][b] if k == steps - 1 else value[k + 1, b]
                if terminated[k, b]:
                    beyond = 0.0
                result[t, b] += (gamma * gae_lambda) ** ahead * (reward[k, b] + gamma * beyond - value[k, b])
                if terminated[k, b] or rollout["truncated"][k, b]:
                    break
    return result


def ppo_loss(logits, value, batch, hyper, clip_value_loss=True):
    """The loss, its parts, and its gradients d_logits [N, A] and d_value [N], of a batch with its `advantage`."""
    eps = hyper["clip_epsilon"]
    share = batch["weight"] / max(batch["weight"].sum(), 1.0)
    log_probs = log_softmax(logits)
    probs = np.exp(log_probs)
    chosen = np.eye(logits.shape[1])[batch["action"]]
    log_ratio = (log_probs * chosen).sum(-1) - batch["log_prob"]
    ratio = np.exp(log_ratio)
    advantage = batch["advantage"]

    # The clipped term is the smaller one exactly where the ratio left the range on the advantage's side.
    clipped = np.where(advantage > 0, ratio > 1 + eps, ratio < 1 - eps)
    surrogate = np.where(clipped, np.where(advantage > 0, 1 + eps, 1 - eps), ratio) * advantage
    d_log_prob = -share * np.where(clipped, 0.0, ratio * advantage)
    d_logits = d_log_prob[:, None] * (chosen - probs)

    change = value - batch["value"]
    kept = batch["value"] + np.minimum(np.maximum(change, -eps), eps)
    error, kept_error = (value - batch["target"]) ** 2, (kept - batch["target"]) ** 2
    if not clip_value_loss:
        kept_error = error
    d_error = np.where(
        error >= kept_error, value - batch["target"], (kept - batch["target"]) * (np.abs(change) < eps)
    )
    d_value = hyper["value_coef"] * share * d_error

    entropy = -(probs * log_probs).sum(-1)
    d_logits += hyper["entropy_coef"] * share[:, None] * probs * (log_probs + entropy[:, None])

    parts = {
        "policy_loss": -(share * surrogate).sum(),
        "value_loss": 0.5 * (share * np.maximum(error, kept_error)).sum(),
        "entropy": (share * entropy).sum(),
        "approx_kl": (share * (ratio - 1 - log_ratio)).sum(),
        "clip_fraction": (share * (np.abs(ratio - 1) > eps)).sum(),
    }
    parts["loss"] = (
        parts["policy_loss"] + hyper["value_coef"] * parts["value_loss"] - hyper["entropy_coef"] * parts["entropy"]
    )
    return parts, d_logits, d_value


def normalize(advantage, weight, unbiased_std=False):
    """Mean 0 and standard deviation 1 over the samples that count (weights are 0 or 1)."""
    counted = advantage[weight > 0]
    if counted.size == 0:
        return np.zeros_like(advantage)
    return (advantage - counted.mean()) / (counted.std(ddof=int(unbiased_std)) + 1e-8)


def with_ends(rollout, truncation_is_terminal=False, learn_from_auto_resets=False):
    """The rollout in which cut-off games are lost ones, and every step counts."""
    changed = {}
    if truncation_is_terminal:
        changed["terminated"] = np.logical_or(rollout["terminated"], rollout["truncated"])
    if learn_from_auto_resets:
        changed["weight"] = np.full(rollout["weight"].shape, 1.0)
    return rollout | changed


def stacks_of(rollout, where, size=4):
    """What environment b saw at step t: the last 4 frames of its game.

    The first frame is repeated where the game is younger.
    """
    frames, age = rollout["frames"], rollout["age"]
    seen = [[frames[t + size - 1 - min(back, age[t, b]), b] for back in reversed(range(size))] for t, b in where]
    return np.moveaxis(np.array(seen), 1, -1)


def minibatch_gradients(params, stacks, batch, hyper, clip_value_loss=True):
    """Loss parts and parameter gradients of one minibatch."""
    logits, value, cache = forward(params, stacks)
    parts, d_logits, d_value = ppo_loss(logits, value, batch, hyper, clip_value_loss)
    parts["kink_margin"] = cache[-1]
    return parts, backward(params, cache, d_logits, d_value)


def a2c_gradients(params, rollout, hyper):
    """The gradient of A2C (Mnih et al. 2016) on a rollout [T, B], of

        -log pi(a) (R - V) - c_e H + c_v (R - V)^2 / 2

    R is the n-step return to the end of the game or of the rollout; the advantage R - V is a constant to the
    policy.
    """
    steps, num_envs = rollout["action"].shape
    beyond, target = rollout["bootstrap_value"], np.zeros((steps, num_envs))
    for t in reversed(range(steps)):
        next_value = rollout["value"][t + 1] if t + 1 < steps else rollout["bootstrap_value"]
        beyond = np.where(rollout["truncated"][t], next_value, beyond)
        target[t] = rollout["reward"][t] + hyper["gamma"] * np.where(rollout["terminated"][t], 0.0, beyond)
        beyond = target[t]
    logits, value, cache = forward(params, stacks_of(rollout, np.ndindex(steps, num_envs)))
    share = rollout["weight"].reshape(-1) / rollout["weight"].sum()
    error = value - target.reshape(-1)
    probs, log_probs = np.exp(log_softmax(logits)), log_softmax(logits)
    chosen = np.eye(logits.shape[1])[rollout["action"].reshape(-1)]
    entropy = -(probs * log_probs).sum(-1, keepdims=True)
    d_logits = (share * error)[:, None] * (chosen - probs)
    d_logits += hyper["entropy_coef"] * share[:, None] * probs * (log_probs + entropy)
    return backward(params, cache, d_logits, hyper["value_coef"] * share * error)


def global_norm(gradients):
    return np.sqrt(sum((x**2).sum() for layer in gradients.values() for x in layer.values()))


def _map(function, first, *others):
    """A function of each parameter."""
    return {
        name: {key: function(x, *(other[name][key] for other in others)) for key, x in layer.items()}
        for name, layer in first.items()
    }


class Adam:
    """Adam with the gradient scaled down to a global norm first, and decoupled weight decay."""

    def __init__(self, params, max_grad_norm, epsilon, weight_decay):
        self.first = self.second = _map(np.zeros_like, params)
        self.steps, self.max_grad_norm, self.epsilon, self.weight_decay = 0, max_grad_norm, epsilon, weight_decay

    def step(self, params, gradients, learning_rate, b1=0.9, b2=0.999):
        self.steps += 1
        scale = min(1.0, self.max_grad_norm / max(global_norm(gradients), 1e-300))
        self.first = _map(lambda m, g: b1 * m + (1 - b1) * scale * g, self.first, gradients)
        self.second = _map(lambda v, g: b2 * v + (1 - b2) * (scale * g) ** 2, self.second, gradients)

        def moved(x, m, v):
            m_hat, v_hat = m / (1 - b1**self.steps), v / (1 - b2**self.steps)
            return x - learning_rate * (m_hat / (np.sqrt(v_hat) + self.epsilon) + self.weight_decay * x)

        return _map(moved, params, self.first, self.second)


def update(
    params, rollout, hyper, indices, optimizer, normalize_advantages=True, clip_value_loss=True, unbiased_std=False
):
    """One gradient step for each row of `indices` (samples t * B + b).

    Returns parameters and each minibatch's loss parts.
    """
    num_envs = rollout["action"].shape[1]
    advantage = advantages(rollout, hyper["gamma"], hyper["gae_lambda"])
    rollout = rollout | {"advantage": advantage, "target": advantage + rollout["value"]}
    history = []
    for row in indices:
        where = [divmod(int(index), num_envs) for index in row]
        names = ("action", "log_prob", "value", "weight", "target", "advantage")
        batch = {name: np.array([rollout[name][tb] for tb in where]) for name in names}
        if normalize_advantages:
            batch["advantage"] = normalize(batch["advantage"], batch["weight"], unbiased_std)
        parts, gradients = minibatch_gradients(params, stacks_of(rollout, where), batch, hyper, clip_value_loss)
        parts["gradient_norm"] = global_norm(gradients)
        params = optimizer.step(params, gradients, hyper["learning_rate"])
        history.append(parts)
    return params, history
