"""[run.checkpoints]: when checkpoints are saved, which are kept, and where copies of them are."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from graphtrain.config.schema.types import STRICT, WRONG_PATH, LocalPath, NotNegativeFloat, Positive
from sharding_rules.paths import check_endpoint, check_local_path

_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")  # that can be written and listed


def _store_url(url: str) -> str:
    scheme, reason = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", url), None
    if scheme is None:
        try:
            return check_local_path(url)
        except ValueError as error:
            reason = str(error)
    elif scheme[1] not in _SCHEMES:
        reason = (
            f'"{url}" cannot hold checkpoints; write s3://BUCKET/PATH, gs://..., az://... or the '
            "path of a directory, and for another store with the interface of S3 also endpoint"
        )
    elif not url[scheme.end() :].partition("/")[0]:
        reason = f'"{url}" names no bucket; write {scheme[0]}BUCKET/PATH'
    else:
        return url
    raise PydanticCustomError(WRONG_PATH, "{reason}", {"reason": reason})


def _endpoint(url: str) -> str:
    try:
        return check_endpoint(url)
    except ValueError as error:
        raise PydanticCustomError(WRONG_PATH, "{reason}", {"reason": str(error)}) from None


StoreUrl = Annotated[str, Field(min_length=1), AfterValidator(_store_url)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointSettings:
    """When checkpoints are saved, which of them are kept, and where copies of them are."""

    local: LocalPath | None = None  # their directory, as on a RAM disk; unset: that of the run
    copies: Literal[0, 1] = 0  # on the next host, where local is a disk of each host
    local_every: Positive = 1000  # steps between checkpoints; the last step is always saved
    keep: Positive = 3  # number of newest checkpoints to keep, on disk and in the object store
    keep_best: bool = False  # save and keep the checkpoint with the lowest validation loss too
    keep_every: Positive | None = None  # keep every checkpoint whose step is a multiple of this
    remote: StoreUrl | None = None  # object store for copies, s3://, gs:// or az://; or a directory
    # Where local is a disk of each host, steps between checkpoints in the directory of the run too.
    remote_every: Positive | None = None  # steps between copies; unset: every checkpoint
    remote_timeout: NotNegativeFloat = 600.0  # seconds that the end of a run waits for the last one
    endpoint: Endpoint | None = None  # server of an S3-compatible store; unset: $AWS_ENDPOINT_URL

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.remote is None:
            raise ValueError("endpoint needs remote, which is not set")
        if self.remote_every is not None and self.remote is None and self.local is None:
            raise ValueError("remote_every needs remote or local, neither of which is set")
        if self.copies and self.local is None:
            raise ValueError("copies needs local, which is not set")
        if self.remote_every is not None and self.remote_every % self.local_every:
            raise ValueError(
                f"remote_every = {self.remote_every} is not a multiple of local_every = "
                f"{self.local_every}; only checkpoints that were saved can be copied"
            )
