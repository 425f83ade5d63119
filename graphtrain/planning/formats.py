"""Numbers as text; an unknown number is "unknown", never 0."""

UNKNOWN = "unknown"


def format_seconds(value: float | None) -> str:
    """Format a number of seconds with three significant digits, or "unknown"."""
    if value is None:
        return UNKNOWN
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def format_share(value: float | None) -> str:
    """Format a share in percent, or "unknown"."""
    return UNKNOWN if value is None else f"{value:.1%}"
