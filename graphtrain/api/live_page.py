"""Show runs on a local page while they train."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from graphtrain.api.configuration import log, open_cache

if TYPE_CHECKING:
    from graphtrain.api.configuration import Source


def watch(
    *runs: Source,
    host: str = "127.0.0.1",
    port: int = 8008,
    cache: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = log,
) -> None:
    """Serve a page with the curves of runs, also while they train, until SIGTERM or Ctrl-C.

    The files of the runs are only read.

    Args:
        runs: Directories or summaries of runs, or their configurations in any form.
        host: Address to listen on.
        port: Port to listen on; 0 for any that is free.
        cache: Directory of compiled programs, with whose memory and time the measured ones are
            compared; None for $GRAPHTRAIN_CACHE, else ./cache.
        log: Called with the address; by default the logger "graphtrain".

    Raises:
        UserError: a configuration is wrong, the port cannot be used, or a package is missing.
    """
    from graphtrain.api.runs import directory_of
    from graphtrain.run.watch.server import serve_page

    directories = [Path(directory_of(run)) for run in runs]
    serve_page(directories, open_cache(cache), host=host, port=port, log=log)
