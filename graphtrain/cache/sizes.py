"""File sizes in decimal units: formatting and parsing."""

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")  # powers of 1000


def format_size(nbytes: int) -> str:
    """Format a number of bytes, for example 512 B or 18.7 MB."""
    size, unit = float(nbytes), 0
    while size >= 999.95 and unit < len(_UNITS) - 1:  # 999.95 would print as 1000.0
        size, unit = size / 1000, unit + 1
    return f"{nbytes} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def parse_size(text: str) -> int:
    """Return the number of bytes of a size such as 500, 500MB or 1.5 GB.

    Raises:
        ValueError: text is not a size.
    """
    number_text = text.strip().rstrip("BbKkMmGgTtPp ")
    unit = text.strip()[len(number_text) :].strip().lower().rstrip("b")
    powers = {name.lower().rstrip("b"): power for power, name in enumerate(_UNITS)}
    if unit not in powers or not number_text.replace(".", "", 1).isdecimal():
        raise ValueError(f"{text!r} is not a size; use a form such as 500MB or 1.5GB")
    return int(float(number_text) * 1000 ** powers[unit])
