"""`graphtrain cache`: list, show, verify, explain, share and remove compiled programs."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from graphtrain.cache import Cache, CacheEntry, Explanation
from graphtrain.cache.configurations import StoredConfiguration, group_by_configuration
from graphtrain.cache.descriptions import describe_settings
from graphtrain.cache.key import CacheKey
from graphtrain.cache.sizes import format_size
from graphtrain.cli.cache_page import program_page, utc_minute
from graphtrain.cli.cache_sharing import exchange, exchange_options, key, verify_option
from graphtrain.cli.options import (
    FiniteRange,
    Size,
    config_argument,
    json_option,
    make_cache_option,
    overrides_option,
    target_option,
)
from graphtrain.cli.terminal import printable, say
from graphtrain.cli.usage import Group
from graphtrain.errors import CacheError

_DIGITS = 12  # shown of a digest in a table
_LINES = 20  # differences shown in one explanation
_NAME_WIDTH = 16  # of the names in `cache show`
_HEADER = ("  program", "graph", "target", "created", "last used", "size", "")

_store = make_cache_option(Cache, must_exist=True)
_new_store = make_cache_option(Cache)  # which the command may create


@click.group("cache", cls=Group)
def command() -> None:
    """List, show, verify, explain, share and remove compiled programs."""


@command.command("ls")
@_store
@json_option
def ls(cache: Cache, as_json: bool) -> None:
    """List the stored programs by configuration, most recently used first. Times are in UTC.

    Above the programs of a configuration stand its name, as the command that compiled it was given
    it, and the sizes of its model and batch; then whatever tells it from another one.
    """
    entries = cache.list()
    pinned = cache.pinned()
    if as_json:
        _print_json([_entry_facts(entry, entry.program in pinned) for entry in entries])
        return
    if entries:
        _print_groups(group_by_configuration(entries), pinned)
    total = format_size(sum(entry.nbytes for entry in entries))
    say(f"{len(entries)} programs, {total}, in {cache.root}")


@command.command("show")
@click.argument("digest_prefix")
@_store
@json_option
def show(digest_prefix: str, cache: Cache, as_json: bool) -> None:
    """Show what a program was compiled from, when and by whom, its sizes and its versions.

    DIGEST_PREFIX is the start of the digest of the program, or of a request that it answers. --json
    prints the stored record, with every array.
    """
    facts = cache.describe(digest_prefix)
    if as_json:
        _print_json(facts)
        return
    (entry,) = (one for one in cache.list() if one.program == facts["program"])
    for name, value in program_page(facts, entry, pinned=entry.program in cache.pinned()):
        click.echo(f"{name:<{_NAME_WIDTH}}{_one_line(value)}".rstrip())


@command.command("verify")
@_store
@click.option("--repair", is_flag=True, help="Move damaged programs to quarantine.")
@json_option
def verify(cache: Cache, repair: bool, as_json: bool) -> None:
    """Read every stored byte and report damaged entries. Exits with 2 if there are any."""
    report = cache.verify(repair=repair)
    if as_json:
        facts = asdict(report)
        for problem in facts["problems"]:
            problem["path"] = str(problem["path"])
        _print_json(facts)
    else:
        for problem in report.problems:
            click.echo(printable(f"{problem.kind}: {problem.path}: {problem.reason}"))
    summary = f"{report.programs} programs and {report.requests} requests are intact"
    if report.valid:
        say(f"{summary}; {len(report.problems)} repaired" if repair else summary)
        return
    unrepaired = sum(not problem.repaired for problem in report.problems)
    remedy = "" if repair else "; run: graphtrain cache verify --repair"
    raise CacheError(f"{summary}, unusable: {unrepaired}{remedy}")


@command.command("trust")
@click.argument("directory", type=click.Path(path_type=Path), required=False)
@click.option("--list", "list_only", is_flag=True, help="List the trusted cache directories.")
@click.option("--remove", is_flag=True, help="Stop trusting DIRECTORY.")
def trust(directory: Path | None, list_only: bool, remove: bool) -> None:
    """Load every program in the cache DIRECTORY, whoever stored it.

    By default, only programs that you compiled or pulled are loaded, and a cache that others can
    write is refused. A program is code that runs as you, so trust only a directory to which only
    people whom you trust can write, for example the cache of your group.
    """
    from graphtrain.cache import authentication

    if list_only:
        trusted = sorted(authentication.trusted_caches())
        for path in trusted:
            click.echo(printable(path))
        if not trusted:
            say("no directory is trusted")
    elif directory is None:
        raise click.UsageError("give the DIRECTORY of a cache, or --list")
    elif remove:
        click.echo(f"no longer trusted: {authentication.untrust_cache(directory)}")
    else:
        click.echo(f"programs in {authentication.trust_cache(directory)} are loaded from now on")


@command.command("explain")
@config_argument
@target_option
@overrides_option
@_store
@json_option
def explain(
    config: Path, target: str | None, overrides: tuple[str, ...], cache: Cache, as_json: bool
) -> None:
    """Report whether each graph of CONFIG is cached and, if not, which part of its key changed.

    CONFIG is a configuration file, or a directory written by graphtrain extract.
    """
    explanations = cache.explain_all(_requests(config, target, overrides))
    if as_json:
        _print_json({graph: explained.to_json() for graph, explained in explanations.items()})
        return
    for explained in explanations.values():
        _print_explanation(explained)


def _requests(config: Path, target: str | None, overrides: Sequence[str]) -> dict[str, CacheKey]:
    """Return the request keys of a configuration, as of compile, or of extracted graphs."""
    if config.is_dir():
        from graphtrain.compile import extracted_graphs
        from graphtrain.torch_xla import graphs

        extracted = extracted_graphs.extracted_graphs(graphs.read_extraction(config), target)
        return {one.name: extracted_graphs.request_key(one) for one in extracted.values()}
    from graphtrain.api.checks.fallback import fallback_programs
    from graphtrain.compile.tasks import run_requests
    from graphtrain.config import load_config
    from graphtrain.config.resolve import resolve

    loaded = load_config(config, overrides, target=target)
    return run_requests(resolve(loaded.program), loaded.run, fallback_programs(loaded))


@command.command("gc")
@_store
@click.option(
    "--max-size",
    type=Size(),
    help="Remove the least recently used programs until at most this much is stored, for example "
    "20GB. [default: no limit]",
)
@click.option(
    "--max-age-days",
    type=FiniteRange(min=0),
    help="Remove programs not used for this many days, and records of failures that are older. "
    "[default: no limit]",
)
@click.option(
    "--other-toolchains",
    is_flag=True,
    help="Remove programs made with package versions other than those on this machine.",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="DIGEST",
    help="Digest of a program that is not removed. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Report what would be removed, and remove nothing.")
def gc(
    cache: Cache,
    max_size: int | None,
    max_age_days: float | None,
    other_toolchains: bool,
    keep: tuple[str, ...],
    dry_run: bool,
) -> None:
    """Remove leftovers, and programs beyond the given limits, least recently used first.

    Leftovers are requests without a program, temporary files and quarantined entries. Pinned
    programs, and programs in use, are never removed.
    """
    kept_programs = [cache.resolve(prefix) for prefix in keep]
    result = cache.gc(
        max_bytes=max_size,
        max_age_days=max_age_days,
        other_toolchains=other_toolchains,
        keep=kept_programs,
        dry_run=dry_run,
    )
    verb = "would remove" if dry_run else "removed"
    for entry in result.removed:
        line = f"{verb} {entry.program[:_DIGITS]} {entry.graph} {format_size(entry.nbytes)}"
        click.echo(printable(line))
    for entry in result.leased:
        say(f"in use, not removed: {entry.program[:_DIGITS]} {entry.graph}")
    freed, remaining = format_size(result.removed_bytes), format_size(result.remaining_bytes)
    say(
        f"{verb} {len(result.removed)} programs ({freed}) and {result.leftovers} leftovers; "
        f"{remaining} {'would ' if dry_run else ''}remain in {cache.root}"
    )


@command.command("pin")
@click.argument("digest_prefix")
@_store
def pin(digest_prefix: str, cache: Cache) -> None:
    """Protect a program from gc, whatever its limits."""
    click.echo(f"pinned {cache.pin(digest_prefix)[:_DIGITS]}")


@command.command("unpin")
@click.argument("digest_prefix")
@_store
def unpin(digest_prefix: str, cache: Cache) -> None:
    """Allow gc to remove a program again."""
    click.echo(f"unpinned {cache.unpin(digest_prefix)[:_DIGITS]}")


def _entry_facts(entry: CacheEntry, pinned: bool) -> dict[str, Any]:
    facts = asdict(entry) | asdict(entry.origin) | {"pinned": pinned}
    del facts["origin"]
    return facts | {"settings": asdict(describe_settings(entry.settings))}


def _row(entry: CacheEntry, pinned: bool) -> tuple[str, ...]:
    size, program = format_size(entry.nbytes), f"  {entry.program[:_DIGITS]}"
    used = utc_minute(entry.last_used)
    return program, entry.graph, entry.target, entry.created[:10], used, size, "pinned" * pinned


def _print_groups(groups: Iterable[StoredConfiguration], pinned: Collection[str]) -> None:
    """Print the programs of each configuration below a line that describes it."""
    lines: list[str | tuple[str, ...]] = [_HEADER]
    for group in groups:
        lines += [str(group), *(_row(one, one.program in pinned) for one in group.entries)]
    _print_columns(lines)


def _print_explanation(explanation: Explanation) -> None:
    click.echo(printable(explanation.reason))
    for line in explanation.lines[:_LINES]:
        click.echo(f"  {_one_line(line)}")
    if len(explanation.lines) > _LINES:
        click.echo(f"  and {len(explanation.lines) - _LINES} more")


def _print_columns(lines: Sequence[str | tuple[str, ...]]) -> None:
    """Print rows in aligned columns, and lines. A rich table of thousands would take seconds."""
    safe = [_one_line(one) if isinstance(one, str) else tuple(map(_one_line, one)) for one in lines]
    columns = zip(*(row for row in safe if not isinstance(row, str)), strict=True)
    widths = [max(map(len, column)) for column in columns]
    click.echo("\n".join(one if isinstance(one, str) else _aligned(one, widths) for one in safe))


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join(cells).rstrip()


def _one_line(text: str) -> str:
    """Return text from a cache file as one line that a terminal does not obey."""
    return printable(text).replace("\n", "\\n")


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


@command.command("push")
@exchange_options
@verify_option
@_store
def push(cache: Cache, **options: Any) -> None:
    """Sign programs with your key and upload them to STORE, a directory or a URL.

    Sends the programs that CONFIGS need, or every program if none is given. Programs that STORE
    already has undamaged are skipped.
    """
    exchange(["push"], cache, **options)


@command.command("pull")
@exchange_options
@_new_store
def pull(cache: Cache, **options: Any) -> None:
    """Download programs from STORE, a directory or a URL.

    Fetches the programs that CONFIGS need, or every program if none is given. Programs that no
    trusted key has signed are refused (status 2).
    """
    exchange(["pull"], cache, **options)


@command.command("sync")
@exchange_options
@verify_option
@_new_store
def sync(cache: Cache, **options: Any) -> None:
    """Pull from STORE, then push to it."""
    exchange(["pull", "push"], cache, **options)


command.add_command(key)
