"""Changes to what a run has recorded, and the command `verify`, which is to find them."""

import shutil
import threading

import jax
import numpy as np
import pytest
from small_training import edit_meta, first_arrays

from jaxrl_atari import cli
from jaxrl_atari.runs.actions import segments
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.verify.__main__ import main as verify


def verify_status(capsys, *arguments):
    """The exit status of the command, and its last line."""
    threads = set(threading.enumerate())
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: verify(list(map(str, arguments))))
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)  # one that still draws would wait for itself if it were collected there
        assert not thread.is_alive(), thread
    output = capsys.readouterr()
    return end.value.code, (output.err or output.out).splitlines()[-1]


def segment_paths(session_dir):
    return [path for *_, path in segments(session_dir)]


def edit_segment(path, **changes):
    """Replaces arrays of a segment of the log of actions by functions of them."""
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {name: new(arrays[name].copy()) for name, new in changes.items()})


def another_action(actions):
    actions[len(actions) // 2] = (actions[len(actions) // 2] + 2) % 4
    return actions


def edit_row(path, column, text):
    """Changes a cell of the third last row of metrics.csv."""
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[-3][header.index(column)] = text
    path.write_text("\n".join(map(",".join, [header, *rows])) + "\n")


def edit_metas(session_dir, edit):
    """Changes the metas of all checkpoints but the oldest one, and signs them again."""
    for step in Checkpoints(session_dir).env_steps()[1:]:
        meta = Checkpoints(session_dir).read_meta(step)
        edit(meta)
        edit_meta(session_dir, step, **meta)


def change_a_weight(session_dir, config):
    """Changes a weight of the oldest checkpoint, which stays sound in itself. Returns its env steps."""
    checkpoints = Checkpoints(session_dir)
    start = checkpoints.env_steps()[0]
    checkpoint = checkpoints.read(start)
    meta = checkpoint.meta
    arrays = checkpoint.to_device("arrays", first_arrays(config, meta["num_actions"]), jax.devices("cpu")[0])
    kernel = np.array(arrays["train_state"].params["dense"]["kernel"])
    kernel[100, 100] += 1e-3
    params = {**arrays["train_state"].params, "dense": {**arrays["train_state"].params["dense"], "kernel": kernel}}
    arrays["train_state"] = arrays["train_state"].replace(params=params)
    shutil.rmtree(checkpoints.directory / str(start))
    checkpoints.save(start, {"arrays": arrays, "games": checkpoint.items["games"]}, meta, meta["score"])
    assert checkpoints.read_meta(start)["checksums"] != meta["checksums"]
    return start
