"""`jit` for small programs that a test runs once or twice: XLA compiles them in a seventh of the time."""

from functools import partial

import jax

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
jit = partial(jax.jit, compiler_options=OPTIONS)
"""`jax.jit`, with the options above."""
