"""[run.data.stream]: datasets in an object store, of which a run reads what its batches need."""

import hashlib
import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from graphtrain.config.schema.checkpoints import Endpoint
from graphtrain.config.schema.types import STRICT, WRONG_PATH, LocalPath, Positive, PositiveFloat
from sharding_rules.paths import check_local_path

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_streamed(prefix: str) -> bool:
    """Return whether a dataset is in an object store, by its URL without .bin and .idx."""
    return _URL.match(prefix) is not None


def _dataset_place(prefix: str) -> str:
    scheme = _URL.match(prefix)
    try:
        if scheme is None:
            return check_local_path(prefix)
    except ValueError as error:
        raise PydanticCustomError(WRONG_PATH, "{reason}", {"reason": str(error)}) from None
    bucket, _, name = prefix[scheme.end() :].partition("/")
    if scheme[1].lower() not in _SCHEMES:
        reason = (
            f'"{prefix[:80]}" is in no store that datasets can be streamed from; write '
            "s3://BUCKET/PATH, gs://..., az://..., https://... or a path, and for another store "
            "with the interface of S3 also run.data.stream.endpoint"
        )
    elif not bucket or not name or prefix.endswith("/"):
        reason = f'"{prefix[:80]}" names no dataset; write {scheme[0]}BUCKET/FOLDER/train'
    else:
        return prefix
    raise PydanticCustomError(WRONG_PATH, "{reason}", {"reason": reason})


DatasetPlace = Annotated[str, AfterValidator(_dataset_place)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StreamSettings:
    """Cache on each host for datasets in an object store, and how long a run waits for the store.

    Indexes are fetched whole. Of the tokens, only blocks that the batches need are fetched.
    """

    cache: LocalPath | None = None  # directory on each host; unset: ~/.cache/graphtrain/data
    cache_mb: Positive = 8192  # MB of tokens of a dataset that each process keeps in the cache
    timeout: PositiveFloat = 600.0  # seconds for which failed requests are repeated
    endpoint: Endpoint | None = None  # server of an S3-compatible store; unset: $AWS_ENDPOINT_URL

    def local_prefix(self, url: str) -> str:
        """Return the path prefix of the local files of a dataset in a store."""
        user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        root = Path(self.cache or Path(user_cache, "graphtrain", "data")).expanduser()
        folder, _, name = url.rpartition("/")
        place = hashlib.sha256(f"{self.endpoint} {folder}".encode()).hexdigest()[:16]
        return str(root / place / name)
