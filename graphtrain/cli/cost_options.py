"""Options --tokens and --prices: what a number of tokens takes on a machine."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphtrain.cli.options import LocalPath

if TYPE_CHECKING:
    from graphtrain.config import Config
    from graphtrain.planning.costs import Workload


class _Tokens(click.ParamType):
    """Number of tokens, for example 300000000000, 3e11 or 300B."""

    name = "tokens"
    units = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).strip()
        unit = self.units.get(text[-1:].upper(), 1)
        try:
            tokens = float(text[:-1] if unit > 1 else text) * unit
        except ValueError:
            self.fail(f"{text[:100]!r} is not a number of tokens, as 3e11 or 300B", param, ctx)
        if not 1 <= tokens <= 1e18:
            self.fail(f"{text[:100]} is not from 1 to 1e18 tokens", param, ctx)
        return round(tokens)


def cost_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tokens and --prices to a command."""
    tokens = click.option(
        "--tokens",
        type=_Tokens(),
        metavar="N",
        help="Also show the days that training on N tokens takes, for example 300B or 3e11. "
        "[default with --prices: the tokens of the run]",
    )
    prices = click.option(
        "--prices",
        type=LocalPath(),
        metavar="FILE",
        help="Also show what they cost, at the prices of a device for an hour in FILE (TOML).",
    )
    return tokens(prices(function))


def workload(config: "Config", tokens: int | None, prices: Path | None) -> "Workload":
    """Return what the options ask for.

    Raises:
        PlanError: the prices cannot be read.
    """
    from graphtrain.config.tokens import tokens_of_run
    from graphtrain.planning.costs import Workload, read_prices

    if prices is None:
        return Workload(tokens)
    return Workload(tokens_of_run(config) if tokens is None else tokens, read_prices(prices))
