"""Hugging Face model families: tables that map their settings and weights to the native decoder.

Does not import JAX. To add a family: add a module with its tables, a line in FAMILIES below, and a
case in tests/extras/families/test_families.py.
"""

from collections.abc import Mapping
from typing import Any

from graphtrain.config.schema import Model
from graphtrain.errors import WeightsError
from graphtrain.weights.families.baichuan import BAICHUAN
from graphtrain.weights.families.bloom import BLOOM
from graphtrain.weights.families.deepseek import DEEPSEEK_V3, KIMI_K2
from graphtrain.weights.families.family import Family, functional_settings
from graphtrain.weights.families.gemma import GEMMA2, GEMMA3
from graphtrain.weights.families.glm import GLM, GLM4
from graphtrain.weights.families.glm_moe import GLM4_MOE
from graphtrain.weights.families.gpt2 import GPT2
from graphtrain.weights.families.gpt_oss import GPT_OSS
from graphtrain.weights.families.internlm import INTERNLM, INTERNLM2
from graphtrain.weights.families.llama import AQUILA, LLAMA, MISTRAL
from graphtrain.weights.families.mixtral import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from graphtrain.weights.families.qwen import QWEN2, QWEN3

# In order of preference for a model that was not loaded from Hugging Face.
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
    GLM,
    GLM4,
    GPT_OSS,
    GLM4_MOE,
    DEEPSEEK_V3,
    KIMI_K2,
)


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the family named by `model_type` in config.json.

    Raises:
        WeightsError: the family is not supported.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    supported = ", ".join(family.model_type for family in FAMILIES)
    raise WeightsError(
        f"config.json: model_type = {model_type!r} is not supported; supported families: "
        f"{supported}"
    )


def family_of_model(model: Model) -> Family:
    """Return the first family whose config.json can express all settings of a model.

    Raises:
        WeightsError: no family can.
    """
    for family in FAMILIES:
        if family.supports(model):
            return family
    raise WeightsError(
        "no Hugging Face family supports this combination of settings in [program.model]; "
        f"known families: {', '.join(family.model_type for family in FAMILIES)}"
    )


__all__ = ["FAMILIES", "Family", "family_of_config", "family_of_model", "functional_settings"]
