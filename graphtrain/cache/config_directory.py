"""Configuration directory of the user: the secret of the cache, trusted caches and keys."""

import os
from pathlib import Path

from graphtrain.errors import CacheError


def config_directory() -> Path:
    """Return $XDG_CONFIG_HOME/graphtrain, else ~/.config/graphtrain.

    Raises:
        CacheError: this user has no home directory, as in some containers.
    """
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(home) if home else Path.home() / ".config") / "graphtrain"
    except RuntimeError:
        raise CacheError(
            "this user has no home directory; set XDG_CONFIG_HOME to a directory that only this "
            "user can read"
        ) from None
