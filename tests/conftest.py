"""Eight CPU devices for every test, and Orbax's, Grain's and click's own warnings left to them."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
