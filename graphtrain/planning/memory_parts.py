"""Parts of the memory of a device, and who found their sizes."""

from graphtrain.cost_model.assessment import Memory

# Parts of device memory that the compiler reports. Of the others it reports only the sum.
_COUNTED = ("parameters", "frozen", "optimizer", "peak")
PARTS = ("parameters", "frozen", "optimizer", "gradients", "activations", "temporaries", "peak")


def memory_sources(memory: Memory) -> dict[str, str]:
    """Return the source of the size of each part."""
    if memory.source == "estimate":
        return dict.fromkeys(PARTS, "estimate")
    sources = {kind: "compiler" if kind in _COUNTED else "estimate" for kind in PARTS}
    return sources | {"temporaries": "the compiler's peak minus the rows above"}
