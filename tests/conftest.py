"""Eight CPU devices for every test, and shapes checked when models are called."""

import shapes
from hypothesis import settings

shapes.install()

from lowering.machine.target import Target  # noqa: E402
from lowering.xla import backend as xla  # noqa: E402

xla.devices(Target.parse("cpu:8"))  # starts the backend, so that no test takes another number

settings.register_profile("untimed", deadline=None)  # a busy machine is no defect
settings.load_profile("untimed")
