"""Eight CPU devices for every test."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.devices()  # begins the backend, so that no test takes another number
