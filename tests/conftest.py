"""Eight CPU devices stand for GPUs; what one test compiles, the others and their processes need not compile again."""

import atexit
import os
import shutil
import tempfile

# In the environment, before JAX starts: for this process and for those that tests start.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxrl_atari_tests_")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
