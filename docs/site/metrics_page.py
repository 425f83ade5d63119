"""The reference of metrics.jsonl and of the buckets of goodput."""

from markdown import table

from graphtrain.run.goodput.activities import BUCKETS
from graphtrain.run.metrics import METRICS

HEAD = """# Metrics

`graphtrain run` writes one JSON object per line to `metrics.jsonl` in the run directory: one for
every step, and one for every evaluation. TensorBoard shows the same numbers (`tensorboard
--logdir RUN/tensorboard`), unless `run.tensorboard = false`.

"""
TAIL = """
Losses, norms and rates have nine significant digits, from which a float32 is read back exactly;
times and speeds have six. A resumed run removes the records of steps after its checkpoint, because
these steps run again.
To read the file from Python:

```python
from pathlib import Path

from graphtrain.run.metrics import read_journal

losses = [record["loss"] for record in read_journal(Path("runs/quickstart")) if "loss" in record]
```

The line that `run` prints every `run.report_every` steps shows the mean speed since the previous
line, and the loss of the last step.

"""
GOODPUT = """## Goodput

`graphtrain goodput RUN` counts the wall time of a run in these buckets, which add up to it
([long runs](../guides/long-runs.md#goodput)):

"""


def page() -> str:
    """Return the page."""
    rows = [(f"`{name}`", meaning) for name, meaning in METRICS.items()]
    buckets = [(f"`{name}`", meaning) for name, meaning in BUCKETS.items()]
    return (
        HEAD + table(("name", "meaning"), rows) + TAIL + GOODPUT
        + table(("bucket", "meaning"), buckets)
    )  # fmt: skip
