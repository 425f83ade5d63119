"""`graphtrain cache push | pull | sync | key`: exchange programs with a remote cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from graphtrain.cache import Cache
from graphtrain.cache.sizes import format_size
from graphtrain.cli.options import (
    ConfigPath,
    LocalPath,
    json_option,
    overrides_option,
    target_option,
)
from graphtrain.cli.terminal import say
from graphtrain.cli.usage import Group

if TYPE_CHECKING:
    from graphtrain.cache.exchange import TransferResult

_REFUSED = 2  # exit status


def exchange_options(function: Callable) -> Callable:
    """Add the arguments STORE and CONFIGS, and the options of push, pull and sync."""
    for option in (
        click.argument("configs", nargs=-1, type=ConfigPath()),
        click.argument("store", metavar="STORE"),
        target_option,
        overrides_option,
        json_option,
    ):
        function = option(function)
    return function


verify_option = click.option(
    "--verify/--no-verify",
    default=None,
    help="Read what STORE already has, and send again what a pull would refuse. [default: only if "
    "STORE is a directory]",
)


def exchange(
    verbs: Sequence[str],
    cache: Cache,
    store: str,
    configs: Sequence[Path],
    target: str | None,
    overrides: Sequence[str],
    as_json: bool,
    verify: bool | None = None,
) -> None:
    """Push, pull, or both in the given order, and print what was sent and received.

    Args:
        verify: whether to send again what the store has and a pull would refuse; None: if the store
            is a directory.
    """
    from graphtrain.cache import exchange
    from graphtrain.cache.remote import ObjectStore
    from graphtrain.cache.trust import KeyStore, default_directory

    chosen = _requests(configs, target, overrides)
    remote, keys = ObjectStore(store, create="push" in verbs), KeyStore(default_directory())
    listed = exchange.RemoteListing.of(remote) if len(verbs) > 1 else None
    results = {}
    for verb in verbs:
        with _progress(verb) as observe:
            if verb == "pull":
                results[verb] = exchange.pull(cache, remote, keys, chosen, observe, listed)
            else:
                checked = remote.is_directory if verify is None else verify
                results[verb] = exchange.push(
                    cache, remote, keys, chosen, observe, listed, verify=checked
                )
    if as_json:
        click.echo(json.dumps({verb: vars(result) for verb, result in results.items()}))
    else:
        for verb, result in results.items():
            _print(verb, store, result)
    if any(result.rejected for result in results.values()):
        sys.exit(_REFUSED)


def _requests(
    configs: Sequence[Path], target: str | None, overrides: Sequence[str]
) -> list[str] | None:
    """Return the request digests that configurations need; None means every program."""
    if not configs:
        return None
    from graphtrain.api.checks.fallback import fallback_programs
    from graphtrain.compile.tasks import run_tasks
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve

    loaded = [load_config(path, overrides, target) for path in configs]
    tasks = [
        task
        for config in loaded
        for task in run_tasks(
            {"": resolve(config.program)}, {"": config.run}, {"": fallback_programs(config)}
        )
    ]
    return [task.request.digest for task in tasks]


def _print(verb: str, store: str, result: TransferResult) -> None:
    for reason in result.rejected:
        say(f"refused: {reason}")
    for reason in result.replaced:
        say(f"damaged, sent again: {reason}")
    click.echo(
        f"{verb} {store}: {len(result.programs)} programs, {format_size(result.nbytes)}, "
        f"{len(result.requests)} requests"
    )
    if result.missing:
        say(f"{len(result.missing)} of the requested graphs are not in {store}")


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda completed, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as display:
        row = display.add_task(verb)
        yield lambda completed, total: display.update(row, completed=completed, total=total)


@click.group("key", cls=Group)
def key() -> None:
    """Manage the key that signs your programs, and the keys that you trust."""


@key.command("new")
def new() -> None:
    """Create a signing key, and print its public half for others to trust."""
    click.echo(json.dumps(_keys().create(), indent=1))


@key.command("show")
def show() -> None:
    """Print the public half of your signing key."""
    click.echo(json.dumps(_keys().own_public_key(), indent=1))


@key.command("trust")
@click.argument("name")
@click.argument("file", type=LocalPath())
def trust(name: str, file: Path) -> None:
    """Trust the public key in FILE, as NAME: programs signed with it may run on this machine."""
    _keys().trust(name, file)
    click.echo(f"programs signed by {name} may run on this machine")


@key.command("untrust")
@click.argument("name")
def untrust(name: str) -> None:
    """Stop trusting the key NAME. Programs pulled before stay in the cache."""
    _keys().untrust(name)
    click.echo(f"programs signed by {name} are no longer accepted")


@key.command("ls")
def ls() -> None:
    """List the trusted keys."""
    trusted = _keys().trusted()
    for name, public in trusted.items():
        click.echo(f"{name}  {public['keyid']}")
    if not trusted:
        say("no keys; create yours with graphtrain cache key new")


def _keys():
    from graphtrain.cache.trust import KeyStore, default_directory

    return KeyStore(default_directory())
