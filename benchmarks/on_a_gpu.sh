#!/usr/bin/env bash
# What to measure on a GPU that is borrowed for a quarter of an hour, in order of worth. A part takes at most LIMIT seconds
# (560 by default). A machine that has compiled nothing yet needs 20 to 70 s before the first benchmark or training: XLA
# times kernels. Several parts in one call share what they compile, which the machine forgets when it goes back.
# Run one part at a time: a training reserves 75% of the GPU's memory, and a second one then finds too little.
#
#     bash benchmarks/on_a_gpu.sh speed    # end to end, with the limit that the emulators set, and where the time goes
#     bash benchmarks/on_a_gpu.sh check    # does everything run there? The report of the devices, and the tests marked gpu
#     bash benchmarks/on_a_gpu.sh compare  # alternatives, in alternating runs
#     bash benchmarks/on_a_gpu.sh graphs   # training with and without CUDA graphs, and a CPU beside the GPU
#     bash benchmarks/on_a_gpu.sh train    # several sessions on one GPU, then one session
#     bash benchmarks/on_a_gpu.sh scores   # starts a session of each of $GAMES in the background and returns
#     bash benchmarks/on_a_gpu.sh pack 150 # after 150 s, these runs with their newest checkpoints, in files of 15 MiB
#
# Pack twice (scores; pack 150; pack 150), so that something comes back if the time ends early; the second replaces the first.
# A copy of the checkout without .git leaves `git_revision` in config.json empty: write the commit there before
# make_results.py reads it. `train --resume` continues the runs on any machine (on one without a GPU, with
# --devices.gpu auto), and `verify` recomputes their scores there.
# The output is also in $OUT, by default data/gpu, with the figures as JSON; the runs are in data/gpu/runs. REHEARSAL=1
# makes everything short, for a machine without a GPU: a CPU device stands in for it. benchmarks/NOTES.md says how to get
# the package onto a machine without a network.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-/tmp/xla_cache} # of all parts
out=$(realpath -m "${OUT:-data/gpu}") runs=data/gpu/runs
read -ra games <<<"${GAMES:-breakout pong qbert}"
mkdir -p "$out" "$runs"
config=(--config configs/qbert.py --devices.gpu true)  # an error, rather than the CPU, if CUDA does not start
steps=1000000 long=(--total-env-steps 3000000) few=(--repeats 2 --seconds 2) tests=(-v)
if [ -n "${REHEARSAL:-}" ]; then
    export SIMULATED_GPUS=1 JAXRL_ATARI_IMPORT="[\"$PWD/tests/simulated_gpus.py\"]"
    steps=2048 long=(--total-env-steps 2048) few=(--repeats 1 --seconds 0.1) tests=(--co -q)
    config+=(--ppo.rollout-length 16 --ppo.minibatch-size 128 --ppo.epochs 1)
fi

run() { # NAME COMMAND...
    local name=$1
    shift
    echo "=== $name: $*"
    local left=$((${LIMIT:-560} - SECONDS)) # of this part
    timeout -k 20 $((left > 1 ? left : 1)) "$@" 2>&1 | tee "$out/$name.txt" | grep -v '^{' | tail -n 60
    echo "=== $name: status ${PIPESTATUS[0]} after $SECONDS s of this part"
}
benchmark() { # NAME OPTIONS...
    local name=$1
    shift
    run "$name" python3 -m jaxrl_atari.benchmark "${config[@]}" "${few[@]}" "$@"
    tail -n 1 "$out/$name.txt" >"$out/$name.json"
}
train() { # NAME OPTIONS...
    local name=$1
    shift
    run "$name" python3 -m jaxrl_atari.train "${config[@]}" --run-dir "$runs/$name" "$@"
}

case ${1:-} in
check)
    run driver nvidia-smi
    run devices python3 -m jaxrl_atari.devices --config configs/qbert.py
    mapfile -t files < <(grep -rl mark.gpu tests --include="test_*.py") # the others may need packages that the machine lacks
    run tests python3 -m pytest "${files[@]}" -m gpu "${tests[@]}" -n 0 -W default
    ;;
speed)
    parts=(--parts end_to_end,env,acting,update)
    benchmark default "${parts[@]}"
    benchmark envs_128 --env.num-envs 128 "${parts[@]}"
    benchmark envs_128_minibatch_2048 --env.num-envs 128 --ppo.minibatch-size 2048 "${parts[@]}"
    XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true benchmark trace --trace data/gpu/trace
    find data/gpu/trace -name '*.json.gz' -exec cp {} "$out" \;
    ;;
compare)
    benchmark overlap --env.num-envs 128 --compare overlap=none,update
    benchmark arithmetic --compare network.compute_dtype=float32,bfloat16
    benchmark groups --parts acting --compare env.num_groups=1,2
    benchmark groups_of_128 --env.num-envs 128 --parts acting --compare env.num_groups=1,2,4
    ;;
graphs)
    flag=--xla_gpu_enable_command_buffer
    for round in 1 2; do # CUDA graphs off; XLA's default, which leaves out cuDNN's convolutions
        XLA_FLAGS="$flag=" benchmark "graphs_off_$round" --parts end_to_end
        benchmark "graphs_$round" --parts end_to_end
    done
    benchmark cpu_or_gpu --compare cpu,gpu
    ;;
train)
    train four_sessions --sessions 4 --trial.parallel 4 --total-env-steps "$steps"
    train one_session "${long[@]}"
    ;;
scores)
    share=$(printf '0.%02d' $((90 / ${#games[@]}))) # of the GPU's memory, for each process
    for game in "${games[@]}"; do
        : >"$runs/$game.txt"
        # Seeds 0 and 1 have been trained.
        XLA_CLIENT_MEM_FRACTION=$share setsid nohup python3 -m jaxrl_atari.train --config "configs/$game.py" --seed 2 \
            --run-dir "$runs/$game" --log.checkpoint-every-env-steps 100000 ${REHEARSAL:+--total-env-steps 2048} \
            >>"$runs/$game.txt" 2>&1 &
        # Each one compiles, and times kernels, before the next one starts.
        timeout 150 tail -n +1 -f --pid=$! "$runs/$game.txt" | grep -m 1 -e 'compilation included' -e '^error'
    done
    ;;
pack)
    sleep "${2:-0}"
    cd "$runs" || exit
    for session in "${games[@]/%//session_0}"; do
        newest=$(find "$session/checkpoints" -maxdepth 1 -regex '.*/[0-9]+' | sort -V | tail -n 1)
        ls -d "${session%/*}"/*.json "$session"/{*.csv,actions} "$newest"
    done | tar cf - -T - | split -b 15M - "$out/runs.tar."
    ls -l "$out"/runs.tar.*
    ;;
*)
    sed -n '2,21p' benchmarks/on_a_gpu.sh
    exit 2
    ;;
esac
