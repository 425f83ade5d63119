"""Write the expected counts of this version of JAX anew; read the difference before you commit it.

python tests/golden/write.py
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from counts import CONFIGS, count, difference, render

from lowering.machine.target import Target
from lowering.xla import backend as xla


def main() -> None:
    xla.devices(Target.parse("cpu:8"))  # before another target asks for fewer
    for config in CONFIGS:
        if config.missing:
            print(f"{config}: not written, for want of {config.missing}", file=sys.stderr)
            continue
        counted = count(config)
        config.file.parent.mkdir(exist_ok=True)
        changed = difference(config, counted) if config.file.exists() else "new"
        config.file.write_text(render(counted))
        print(f"{config}: {changed or 'the same'}", flush=True)


if __name__ == "__main__":
    main()
