"""Numbers with their units: conversions, and text for people, where a missing value is `n/a`.

It is the only place that uses bits, giga (10^9) and gibi (2^30). Everywhere else a quantity is in
bytes, seconds, FLOPs, bytes/s or FLOP/s, and its name ends in its unit.
"""

from collections.abc import Sequence

NONE = "n/a"  # the text of a number that is not known
BITS = 8  # per byte
GIGA = 10**9
TERA = 10**12
_KIB = 2**10
MIB = 2**20
GIB = 2**30
HOUR_S = 3600
_MEGA = 10**6
_FOUR_DIGITS = 999.5  # from here on `.3g` gives 1e+03
_LEAST_SHOWN = 0.0005  # in milliseconds or GPU hours; smaller values are shown as 0


def from_gbit_per_s(rate: float) -> float:
    """Convert a link rate from Gbit/s to bytes/s."""
    return rate * GIGA / BITS


def to_gbit_per_s(bytes_per_s: float) -> float:
    """Convert a rate from bytes/s to Gbit/s."""
    return bytes_per_s * BITS / GIGA


def from_gbyte_per_s(rate: float) -> float:
    """Convert a rate from GB/s to bytes/s."""
    return rate * GIGA


def from_gigabytes(size: float) -> int:
    """Convert a size from GB, the unit of host memory and disks, to bytes."""
    return round(size * GIGA)


def from_gibibytes(size: float) -> int:
    """Convert a size from GiB, the unit in which drivers report GPU memory, to bytes."""
    return round(size * GIB)


def from_teraflops(rate: float) -> float:
    """Convert a rate from TFLOP/s to FLOP/s."""
    return rate * TERA


def per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Convert the price of an hour to that of a million tokens, at so many tokens a second."""
    return price_per_hour / HOUR_S / tokens_per_s * _MEGA


def gib(size_bytes: float | None) -> str:
    """Format bytes as `12.3 GiB`, or in MiB or KiB: binary units, as of the driver and torch."""
    if size_bytes is None:
        return NONE
    mebi = round(size_bytes / MIB, 1)
    kibi = round(size_bytes / _KIB, 1)
    if abs(mebi) >= GIB // MIB:
        return f"{size_bytes / GIB:.1f} GiB"
    if abs(kibi) >= MIB // _KIB:
        return f"{mebi:.1f} MiB"
    return f"{kibi:.1f} KiB"


def gigabytes(size_bytes: float) -> str:
    """Format bytes as `12.30 GB`, or in MB or kB: decimal units, as of files and networks."""
    mega = round(size_bytes / 10**6, 1)
    kilo = round(size_bytes / 10**3, 1)
    if abs(mega) >= 1000:
        return f"{size_bytes / GIGA:.2f} GB"
    if abs(kilo) >= 1000:
        return f"{mega:.1f} MB"
    return f"{kilo:.1f} kB"


def gbit_per_s(bytes_per_s: float) -> str:
    """Format bytes/s in Gbit/s: `9 Gbit/s`, `3,200 Gbit/s`."""
    return f"{_digits(to_gbit_per_s(bytes_per_s))} Gbit/s"


def gpu_hours(value_h: float) -> str:
    """Format GPU hours: `0.0123 GPU-hours`, `48.5 GPU-hours`, `1,234 GPU-hours`."""
    return f"{_digits(value_h)} GPU-hours"


def brief(value_s: float | None) -> str:
    """Format seconds as `0.05 ms`, `12 ms`, `1.24 s`, `3 min 05 s` or `2 h 10 min`.

    Less than half a microsecond is `0 ms`.
    """
    if value_s is None:
        return NONE
    if value_s * 1000 < _FOUR_DIGITS:
        return f"{_digits(value_s * 1000)} ms"
    if round(value_s, 2) < 10:
        return f"{value_s:.2f} s"
    if round(value_s, 1) < 60:
        return f"{value_s:.1f} s"
    return _minutes(value_s, ",")


def _digits(value: float) -> str:
    """Format to about three digits, without exponent: `0.0123`, `12.3`, `1,234`; tiny ones `0`.

    Tiny numbers are those below _LEAST_SHOWN.
    """
    if abs(value) < _LEAST_SHOWN:
        return "0"
    if abs(value) < _FOUR_DIGITS:
        return f"{value:.3g}"
    return f"{value:,.0f}"


_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float | None, unit: str = "") -> str:
    """Format a whole number with separators: `12,345 tokens`, `1 token`; `unit` is the plural."""
    if value is None:
        return NONE
    whole = round(value)
    if whole == 1 and "/" not in unit:
        unit = _singular(unit)
    return _with_unit(f"{whole:,}", unit)


def _singular(unit: str) -> str:
    """Return `part of the model` for `parts of the model`."""
    noun, of, rest = unit.partition(" of ")
    ending = "es" if noun.endswith("ches") else "s"
    return noun.removesuffix(ending) + of + rest


def compact(value: float | None, unit: str = "") -> str:
    """Format with three significant digits and a decimal prefix: `1.23 M tokens`."""
    if value is None:
        return NONE
    digits, prefix = _scaled(value)
    return _with_unit(f"{digits} {prefix}".strip(), unit)


def size(value_bytes: float | None) -> str:
    """Format bytes with decimal prefixes: `14.5 MB`."""
    if value_bytes is None:
        return NONE
    digits, prefix = _scaled(value_bytes)
    return f"{digits} {prefix}B"


def seconds(value_s: float | None) -> str:
    """Format a duration in seconds: `8.4 s`, `2 min 05 s`, `1 h 03 min`."""
    if value_s is None:
        return NONE
    if value_s < 59.95:
        return f"{value_s:.1f} s"
    return _minutes(value_s)


def _minutes(value_s: float, thousands: str = "") -> str:
    """Format a minute or more."""
    whole = round(value_s)
    if whole < HOUR_S:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60:{thousands}} h {minutes % 60:02d} min"


def real(value: float | None, unit: str = "", decimals: int = 3) -> str:
    """Format a number with fixed decimals: `2.104 nats/token`."""
    return NONE if value is None else _with_unit(f"{value:,.{decimals}f}", unit)


def rounded(value: float | None, unit: str = "") -> str:
    """Format to about three digits, never with a prefix: `2,061`, `11.1`."""
    if value is None:
        return NONE
    if abs(value) >= _FOUR_DIGITS:
        return _with_unit(count(value), unit)
    return _with_unit(_three_digits(value), unit)


def small(value: float | None, unit: str = "") -> str:
    """Format a number that may be tiny with three significant digits: `3.1e-07`."""
    return NONE if value is None else _with_unit(f"{value:.3g}", unit)


def percent(value: float | None) -> str:
    """Format a fraction as a percentage: `97.3%`."""
    return NONE if value is None else f"{100 * value:.1f}%"


def signed(value: float | None) -> str:
    """Format a relative deviation as a signed percentage: `+14.0%`."""
    return NONE if value is None else f"{100 * value:+.1f}%"


def amount(value: float | None, kind: str) -> str:
    """Format a plan's quantity by its kind: s, bytes, memory, tokens/s, fraction, GPU hours."""
    known = {"s": brief, "bytes": size, "memory": gib, "fraction": percent, "GPU hours": rounded}
    return known[kind](value) if kind in known else compact(value, kind)


def rate(value: float | None, name: str) -> str:
    """Format a machine's rate by its name's suffix: `_flop_s`, `_bytes_s`, or else seconds."""
    if value is None or not name.endswith(("_flop_s", "_bytes_s")):
        return brief(value)
    if name.endswith("_flop_s"):
        return f"{compact(value)}FLOP/s"
    return f"{size(value)}/s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines of left-aligned columns, each as wide as its widest cell."""
    from rich.cells import cell_len, set_cell_size  # here, since it takes time to import

    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit else text


def _scaled(value: float) -> tuple[str, str]:
    """Return three significant digits and the matching decimal prefix."""
    for scale, prefix in _THOUSANDS:
        if abs(value) >= scale * 0.9995:
            return _three_digits(value / scale), prefix
    return _three_digits(value), ""


def _three_digits(value: float) -> str:
    if value == round(value) and abs(value) < 1000:
        return f"{value:.0f}"
    if abs(value) < 9.995:
        return f"{value:.2f}"
    if abs(value) < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"
