"""Permissions of a cache directory: a cache that other users can write is refused."""

import os
import stat
from collections.abc import Callable

from graphtrain.cache.authentication import EntryAuthenticator
from graphtrain.cache.layout import StorePaths
from graphtrain.errors import CacheError


def check_permissions(layout: StorePaths, authenticator: EntryAuthenticator) -> None:
    """Refuse a cache that others control, unless the user trusts it.

    Others could not forge programs, which are authenticated, but could redirect by links what this
    user writes or collects as garbage. Entries need no check of their own: their contents are
    authenticated, and only their owner and those of the directory can replace them.

    Raises:
        CacheError: a directory of the cache can be written by others, belongs to another user, or
            is a symbolic link.
    """
    root = os.fspath(layout.root)
    problem = _problem(root, os.stat) or next(filter(None, map(_inner, _directories(layout))), None)
    if problem and not authenticator.trusts_directory:
        raise CacheError(
            f"{problem}, and a cached program is code that runs with your rights; use another "
            "cache directory with --cache DIR, or, if you trust everyone who can write to this "
            f"one, run: graphtrain cache trust {root}"
        )


def _directories(layout: StorePaths) -> list[str]:
    folders = (
        "programs", "requests", "searches", "leases", "quarantine", "failures", "bundles", "pins",
        "tmp",
    )  # fmt: skip
    versioned = os.fspath(layout.versioned_root)
    return [versioned, *(f"{versioned}/{folder}" for folder in folders)]


def _inner(path: str) -> str | None:
    return _problem(path, os.lstat)


def _problem(path: str, status_of: Callable[[str], os.stat_result]) -> str | None:
    """Return what is wrong with a directory, or None; a missing directory is right."""
    try:
        status = status_of(path)
    except OSError:
        return None  # missing, or reported by the operation that needs it
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    user = os.geteuid()
    if user != 0 and status.st_uid not in (user, 0):
        return f"{path} belongs to another user ({_user_name(status.st_uid)})"
    if status.st_mode & stat.S_IWOTH:
        return f"every user can write to {path} (mode {stat.S_IMODE(status.st_mode):o})"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"the group {_group_name(status.st_gid)} can write to {path}"
    return None


def _is_private_group(group_id: int) -> bool:
    """Return whether a group has the name of this user and no other member.

    Distributions that give each user such a group let it write what the user creates (umask 002).
    """
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user_name(user_id: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _group_name(group_id: int) -> str:
    import grp

    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)
