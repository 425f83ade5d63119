"""Datasets of the user's code that the settings of a run name."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from graphtrain.config.schema import Data
from graphtrain.config.user_code import UserCode
from graphtrain.data.batches.sources import Sources, check_source


def open_sources(data: Data) -> Sources:
    """Return the datasets of the user's code by their references; imports that code.

    Raises:
        ConfigError: the code does not exist, or raised an exception.
        DataError: an object is not a dataset.
    """
    return {code.reference: _open(code, data.arguments) for code in data.user_code}


def source_identity(data: Data, reference: str) -> dict[str, Any]:
    """Return what a dataset of the user's code is: its digest, and those of its sources."""
    (code,) = {one for one in data.user_code if one.reference == reference}
    return {"code": code.key_ingredients(), "digest": _open(code, data.arguments).digest}


def _open(code: UserCode, arguments: Mapping[str, Any] | None) -> Any:
    # The sources are part of the key: a file that was edited is imported again.
    ingredients = json.dumps([code.key_ingredients(), arguments or {}])
    return _opened(code.setting, code.reference, ingredients)


@lru_cache(maxsize=8)  # opened by the checks, the loader and each evaluation
def _opened(setting: str, reference: str, ingredients: str) -> Any:
    source = UserCode(setting, "", reference).call(**json.loads(ingredients)[1])
    check_source(reference, source)
    return source
