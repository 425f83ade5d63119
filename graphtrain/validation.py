"""Validation of JSON from files by types, so that no reader meets a value of another type."""

import json
from functools import cache
from typing import Any, TypeVar

from sharding_rules.documents import DocumentError

_T = TypeVar("_T")


def validate(schema: type[_T], value: Any) -> _T:
    """Return a JSON value as an instance of a dataclass or TypedDict.

    Raises:
        DocumentError: the value does not have this type; the message names the first entry.
    """
    from pydantic import ValidationError  # not needed until a file is read

    try:
        # Through JSON, because the strict mode of pydantic refuses dictionaries for dataclasses.
        return _adapter(schema).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        location, message = ".".join(map(str, problem["loc"])), problem["msg"]
        raise DocumentError(f"{location}: {message}" if location else message) from None


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)
