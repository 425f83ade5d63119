"""The command with a list of what JAX traced and compiled in its process: FILE, then its words."""

import json
import sys
from pathlib import Path

from jax import monitoring

from graphtrain import cli

_PREFIX = "/jax/core/compile/"  # trace, lower, compile


def main() -> None:
    """Run the command; write the names of events to the file, also for when it is killed."""
    file = Path(sys.argv[1])
    events: list[str] = []

    def write() -> None:
        file.write_text(json.dumps(events))

    def record(event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event.startswith(_PREFIX):
            events.append(event)
            write()

    monitoring.register_event_duration_secs_listener(record)
    write()
    sys.argv[1:] = sys.argv[2:]
    cli.main()


if __name__ == "__main__":
    main()
