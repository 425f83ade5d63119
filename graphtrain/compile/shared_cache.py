"""Programs from the remote cache $GRAPHTRAIN_SHARED_CACHE, before anything is compiled."""

import os
from collections.abc import Callable, Iterable

from graphtrain.cache import Cache
from graphtrain.cache.key import CacheKey
from graphtrain.compile.request_keys import request_keys
from graphtrain.config.resolve import ResolvedProgram


def pull_programs(
    cache: Cache, programs: Iterable[ResolvedProgram], log: Callable[[str], None]
) -> None:
    """Fetch the missing graphs of programs from $GRAPHTRAIN_SHARED_CACHE, if it is set."""
    if "GRAPHTRAIN_SHARED_CACHE" in os.environ:
        pull_requests(
            cache, [key for program in programs for key in request_keys(program).values()], log
        )


def pull_requests(cache: Cache, requests: Iterable[CacheKey], log: Callable[[str], None]) -> None:
    """Fetch the missing programs of requests from $GRAPHTRAIN_SHARED_CACHE, if it is set."""
    if "GRAPHTRAIN_SHARED_CACHE" not in os.environ:
        return
    from graphtrain.cache.exchange import pull_from_shared_cache

    pull_from_shared_cache(cache, [request.digest for request in requests], log)
