"""[run.upload]: where copies of the files of a run are uploaded while it trains."""

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from graphtrain.config.schema.checkpoints import Endpoint, StoreUrl
from graphtrain.config.schema.types import STRICT, PositiveFloat

# Other processes of the run wait at most two minutes for rank 0 when the run has ended.
_Timeout = Annotated[float, Field(ge=0, le=100)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class UploadSettings:
    """Copies of metrics, logs, TensorBoard events, profiles and dumps in an object store.

    What has changed is uploaded at each interval and at the end of the run.
    """

    remote: StoreUrl | None = None  # s3://, gs://, az://, or a directory; unset: of run.checkpoints
    every_seconds: PositiveFloat = 60.0  # between uploads of what has changed
    timeout: _Timeout = 60.0  # seconds that the end of a run waits for the last upload
    endpoint: Endpoint | None = None  # S3-compatible server; unset: as for the checkpoints

    def __post_init__(self) -> None:
        if self.endpoint is not None and self.remote is None:
            raise ValueError("endpoint needs remote, which is not set")
