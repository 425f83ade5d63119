"""Eight CPU devices for every test."""

from hypothesis import settings

from lowering.machine.target import Target
from lowering.xla import backend as xla

xla.devices(Target.parse("cpu:8"))  # begins the backend, so that no test takes another number

settings.register_profile("untimed", deadline=None)  # a busy machine is no defect
settings.load_profile("untimed")
