"""Model families of Hugging Face: a table each, of settings and of weights, on the one decoder.

Imports no JAX. To add one: a file beside the others, a line here, and a case in
tests/unit/families/test_families.py.
"""

from collections.abc import Mapping
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.baichuan import BAICHUAN
from graphtrain.weights.families.bloom import BLOOM
from graphtrain.weights.families.family import Family, mathematics
from graphtrain.weights.families.gemma import GEMMA2, GEMMA3
from graphtrain.weights.families.gpt2 import GPT2
from graphtrain.weights.families.internlm import INTERNLM, INTERNLM2
from graphtrain.weights.families.llama import AQUILA, LLAMA, MISTRAL
from graphtrain.weights.families.mixtral import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from graphtrain.weights.families.qwen import QWEN2, QWEN3

# In the order in which a model that came from no family looks for one.
FAMILIES = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    GPT2,
    BLOOM,
    GEMMA2,
    GEMMA3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    BAICHUAN,
    INTERNLM,
    INTERNLM2,
    AQUILA,
)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json says it is of.

    Raises:
        WeightsError: there is no such family here.
    """
    found = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == found:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise WeightsError(f"config.json: model_type = {found!r} is no known family; known: {known}")


def family_for(model: Model) -> Family:
    """The first family that can say all that the settings of a model do.

    Raises:
        WeightsError: none can.
    """
    for family in FAMILIES:
        if family.expresses(model):
            return family
    raise WeightsError(
        "no family of Hugging Face has a model with these settings of [program.model] together; "
        f"the families are {', '.join(family.model_type for family in FAMILIES)}"
    )


__all__ = ["FAMILIES", "Family", "family_for", "family_of", "mathematics"]
