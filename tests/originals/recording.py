"""What the runners share: input and output files, and an Adam that is torch's own and notes what it is asked to
do."""

import sys

import numpy as np
import torch

STEP_NAMES = ("pg_loss", "v_loss", "entropy_loss", "approx_kl")
"""The local names of a gradient step's losses in CleanRL's scripts."""

SB3_NAMES = ("policy_loss", "value_loss", "entropy_loss", "approx_kl_div")
"""The same in stable-baselines3."""


class Notes:
    """Numbers that are noted while an original runs, saved as one file."""

    def __init__(self):
        self.lists = {}
        self.arrays = {}

    def append(self, name, value):
        self.lists.setdefault(name, []).append(np.array(value))

    def save(self, path):
        stacked = {name: np.stack(values) for name, values in self.lists.items()}
        np.savez(path, **stacked, **self.arrays)


def numpy_of(tensor):
    return tensor.detach().cpu().numpy().copy()


def variables_of(names):
    """The local variables of the innermost caller that has all these names."""
    frame = sys._getframe(1)
    while frame is not None:
        if set(names) <= frame.f_locals.keys():
            return frame.f_locals
        frame = frame.f_back
    raise LookupError(f"no caller has the variables {names}")


def install(notes, parameters, steps_per_update, step_names, first_step):
    """Replaces `torch.optim.Adam` by a subclass that starts from `parameters`, and `clip_grad_norm_` by one that
    notes.

    Args:
        first_step: called with the variables of the first gradient step.
    """
    plain_clip = torch.nn.utils.clip_grad_norm_

    def clip_grad_norm_(tensors, max_norm, *arguments, **options):
        tensors = list(tensors)
        if "gradient_norm" not in notes.lists:
            notes.arrays |= {f"gradient_{i}": numpy_of(tensor.grad) for i, tensor in enumerate(tensors)}
        norm = plain_clip(tensors, max_norm, *arguments, **options)
        notes.append("gradient_norm", norm.item())
        return norm

    class Adam(torch.optim.Adam):
        def __init__(self, tensors, *arguments, **options):
            self.tensors = list(tensors)
            with torch.no_grad():
                for tensor, array in zip(self.tensors, parameters, strict=True):
                    tensor.copy_(torch.from_numpy(array))
            self.taken = 0
            super().__init__(self.tensors, *arguments, **options)

        def step(self, closure=None):
            variables = variables_of(step_names)
            if self.taken == 0:
                first_step(variables)
            for name, theirs in zip(
                ("policy_loss", "value_loss", "entropy", "approx_kl"), step_names, strict=True
            ):
                notes.append(name, np.float64(variables[theirs].item()))
            notes.append("learning_rate", self.param_groups[0]["lr"])
            result = super().step(closure)
            self.taken += 1
            if self.taken == steps_per_update:
                notes.arrays |= {f"parameter_{i}": numpy_of(tensor) for i, tensor in enumerate(self.tensors)}
            return result

    torch.optim.Adam = Adam
    torch.nn.utils.clip_grad_norm_ = clip_grad_norm_


def input_arrays(path):
    """The tape and the parameters, as `test_originals.py` wrote them."""
    arrays = dict(np.load(path))
    count = sum(name.startswith("parameter_") for name in arrays)
    return arrays, [arrays[f"parameter_{i}"] for i in range(count)]
