"""jaxrl_atari against the PyTorch yardstick (`torch_ppo.py`): same games, same spec, same machine, by turns.

    python benchmarks/compare_torch.py --what both --rounds 3

Each side runs in a process of its own, so that neither allocator nor threads meet; a round runs each side once, and
the next round in the opposite order. What counts are the ratios within a round: the machine's speed drifts, and both
sides with it. The last line of the output is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def jax_rates(what: str, game: str, iterations: int, seed: int) -> list[float]:
    """Per iteration, gradient samples a second of the update on a real rollout, or the trainer's env steps a second."""
    import jax

    from jaxrl_atari.config import Config, EnvConfig
    from jaxrl_atari.devices import place
    from jaxrl_atari.trainer import Trainer

    config = Config(seed=seed, env=EnvConfig(game=game))
    trainer = Trainer(config, seed, place(config.devices))
    rollouts, hyper = trainer.collect(jax.random.key(seed)), trainer.hyperparameters()
    rates = []
    for number in range(iterations + 1):
        env_steps, start = trainer.env_steps, time.perf_counter()
        if what == "end_to_end":
            jax.block_until_ready(trainer.iterate())
            amount = trainer.env_steps - env_steps
        else:
            jax.block_until_ready(trainer.learner.update(rollouts, hyper, jax.random.key(number)))
            amount = config.ppo.epochs * config.rollout_size
        rates.append(amount / (time.perf_counter() - start))
    trainer.close()
    return rates[1:]


def run_side(side: str, what: str, game: str, iterations: int, seed: int) -> dict[str, Any]:
    """Runs "jax", "torch plain" or "torch tuned" in a new process; returns what its last line says."""
    if side == "jax":
        command = [str(HERE / "compare_torch.py"), "--jax-side"]
    else:
        command = [str(HERE / "torch_ppo.py"), "--mode", side.split()[1]]
    command += ["--what", what, "--game", game, "--iterations", str(iterations), "--seed", str(seed)]
    # Settings of the caller's own would tune one side or the other.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{side}: exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(what: str, modes: list[str], rounds: int, game: str, iterations: int, seed: int) -> dict[str, Any]:
    """Runs all sides `rounds` times, prints each, and returns medians and the ratios jax / torch of each round."""
    sides = ["jax", *(f"torch {mode}" for mode in modes)]
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else sides[::-1]:
            result = run_side(side, what, game, iterations, seed + number)
            results[side].append(result)
            print(
                f"round {number + 1}  {what:10}  {side:11}  {result['median']:8,.0f} {result['unit']}"
                f"  ({result['min']:,.0f} to {result['max']:,.0f}; peak RSS {result['peak_rss_gib']:.2f} GiB)",
                flush=True,
            )
    summary: dict[str, Any] = {side: [result["median"] for result in of_side] for side, of_side in results.items()}
    for side in sides[1:]:
        ratios = [ours / theirs for ours, theirs in zip(summary["jax"], summary[side], strict=True)]
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{what}: jaxrl_atari is {median:.2f} times as fast as {side} ({low:.2f} to {high:.2f})", flush=True)
        summary[f"jax / {side}"] = {"median": round(median, 3), "min": round(low, 3), "max": round(high, 3)}
    return summary | {"peak_rss_gib": {s: max(r["peak_rss_gib"] for r in of_side) for s, of_side in results.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description="jaxrl_atari against plain PyTorch, by turns.")
    parser.add_argument("--what", choices=("update", "end_to_end", "both"), default="both")
    parser.add_argument("--modes", nargs="+", choices=("plain", "tuned"), default=["plain", "tuned"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=5, help="timed in each process, after one that is not")
    parser.add_argument("--game", default="Qbert")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jax-side", action="store_true", help=argparse.SUPPRESS)  # what `run_side` starts
    args = parser.parse_args()
    if args.jax_side:
        import jax
        from report import report

        from jaxrl_atari import runtime

        runtime.configure()  # as `python -m jaxrl_atari.train` does
        rates = jax_rates(args.what, args.game, args.iterations, args.seed)
        print(report(f"jax {jax.__version__}", "default", args.what, rates))
        return
    whats = ["update", "end_to_end"] if args.what == "both" else [args.what]
    summary = {what: compare(what, args.modes, args.rounds, args.game, args.iterations, args.seed) for what in whats}
    print(json.dumps({"game": args.game, "cpus": os.cpu_count(), "rounds": args.rounds} | summary))


if __name__ == "__main__":
    main()
