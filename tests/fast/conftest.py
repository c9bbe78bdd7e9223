"""Fast tests compile many small programs and run each once or twice, so XLA skips most optimisations."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compiled_quickly():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
