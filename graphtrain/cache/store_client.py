"""Clients of object stores: checks of their place, time limits, and retries."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from graphtrain.cache.store_errors import store_errors
from graphtrain.errors import CacheError
from lowering.machine.extras import optional_import
from sharding_rules.paths import check_endpoint, check_url_slashes

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def open_client(
    url: str, patience: float, make: bool, endpoint: str | None, read_timeout: float
) -> Any:
    """Return the client of obstore for a store.

    Args:
        url: Path of a directory, or a URL.
        patience: Seconds for which failed requests are retried.
        make: Create the directory if it does not exist.
        endpoint: URL of a server, in place of that of the environment.
        read_timeout: Seconds without data after which a request is repeated.

    Raises:
        CacheError: the store cannot be opened.
    """
    with optional_import(url):
        from obstore.store import LocalStore, from_url
    with store_errors(url, "open", ""):
        if "://" not in url:
            path = Path(url).expanduser().absolute()
            if make:
                path.mkdir(parents=True, exist_ok=True)
            elif not path.is_dir():
                raise CacheError(f"{url}: no such directory")
            return LocalStore(path)
        if endpoint and url.startswith("gs://"):
            raise CacheError(
                f"{url} has no endpoint of its own; write s3://{url.removeprefix('gs://')} "
                "for one with the interface of S3, as https://storage.googleapis.com has"
            )
        named: Any = {"endpoint": endpoint} if endpoint else None
        return from_url(
            url,
            config=named,
            client_options=_client(url, endpoint, read_timeout),
            retry_config=_retries(patience),
        )


def check_place(url: str, endpoint: str | None) -> None:
    """Check a URL and the server behind it, with which obstore would crash.

    Raises:
        CacheError: the URL names no bucket, or one of both is no URL.
    """
    if url.endswith("://"):
        raise CacheError(f"{url} names no bucket; write {url}BUCKET/PATH")
    try:
        check_url_slashes(url)
    except ValueError as error:
        raise CacheError(str(error)) from None
    servers = {"endpoint": endpoint or ""}
    if url.startswith("s3"):
        servers |= {name: os.environ.get(name, "") for name in _ENDPOINTS}
    for name, server in servers.items():
        try:
            check_endpoint(server or "https://default")
        except ValueError as error:
            raise CacheError(f"{url}: {name} = {error}") from None


def _client(url: str, endpoint: str | None, read_timeout: float) -> Any:
    """Return client options: one hour per transfer, and a limit of the time without data."""
    endpoints = [endpoint or "", url, *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return {
        "allow_http": any(endpoint.startswith("http://") for endpoint in endpoints),
        "read_timeout": timedelta(seconds=read_timeout),
        "timeout": timedelta(hours=1),
    }


def _retries(patience: float) -> Any:
    """Return retry options: limit the time, not the count, for stores that often fail."""
    return {
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=patience),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)},
    }
