"""Eight CPU devices for every test."""

from lowering import jax_xla
from lowering.target import Target

jax_xla.devices(Target.parse("cpu:8"))  # begins the backend, so that no test takes another number
