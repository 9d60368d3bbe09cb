"""Numbers with their units: the conversions, and how people read them."""

from collections.abc import Sequence

# Units: the one place where bits become bytes, and where giga, which is 10^9, meets gibi, which is 2^30.
#
# Everywhere else a quantity is bytes, seconds, FLOPs, or one of them a second, and its name ends in its unit.

BITS = 8  # in a byte
GIGA = 10**9
TERA = 10**12
_KIB = 2**10
MIB = 2**20
GIB = 2**30
HOUR_S = 3600
_FOUR_DIGITS = 999.5  # what `.3g` rounds to 1e+03
_LEAST_SHOWN = 0.0005  # milliseconds, hours of GPUs: less is shown as 0


def from_gbit_per_s(rate: float) -> float:
    """Bytes a second of a link that is sold in Gbit/s."""
    return rate * GIGA / BITS


def to_gbit_per_s(bytes_per_s: float) -> float:
    """Gbit/s of so many bytes a second."""
    return bytes_per_s * BITS / GIGA


def from_gbyte_per_s(rate: float) -> float:
    """Bytes a second of a rate in GB/s."""
    return rate * GIGA


def from_gigabytes(size: float) -> int:
    """Bytes of a size in GB, as memory of hosts and disks is sold."""
    return round(size * GIGA)


def from_gibibytes(size: float) -> int:
    """Bytes of a size in GiB, as drivers count the memory of GPUs."""
    return round(size * GIB)


def from_teraflops(rate: float) -> float:
    """FLOP/s of a rate in TFLOP/s."""
    return rate * TERA


def gib(size_bytes: float | None) -> str:
    """`12.3 GiB`, or MiB and KiB below one of them: as the driver and torch count."""
    if size_bytes is None:
        return NONE
    mebi, kibi = round(size_bytes / MIB, 1), round(size_bytes / _KIB, 1)
    if abs(mebi) >= GIB // MIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{mebi:.1f} MiB" if abs(kibi) >= MIB // _KIB else f"{kibi:.1f} KiB"


def gigabytes(size_bytes: float) -> str:
    """`12.30 GB`, or MB and kB below one of them: as files and networks count."""
    mega, kilo = round(size_bytes / 10**6, 1), round(size_bytes / 10**3, 1)
    if abs(mega) >= 1000:
        return f"{size_bytes / GIGA:.2f} GB"
    return f"{mega:.1f} MB" if abs(kilo) >= 1000 else f"{kilo:.1f} kB"


def gbit_per_s(bytes_per_s: float) -> str:
    """`9 Gbit/s`, `3,200 Gbit/s`."""
    return f"{_digits(to_gbit_per_s(bytes_per_s))} Gbit/s"


def gpu_hours(value_h: float) -> str:
    """`0.0123 GPU-hours`, `48.5 GPU-hours`, `1,234 GPU-hours`."""
    return f"{_digits(value_h)} GPU-hours"


def brief(value_s: float | None) -> str:
    """`0.05 ms`, `12 ms`, `1.24 s`, `3 min 05 s`, `2 h 10 min`; `0 ms` of less than half a microsecond."""
    if value_s is None:
        return NONE
    if value_s * 1000 < _FOUR_DIGITS:
        return f"{_digits(value_s * 1000)} ms"
    if round(value_s, 2) < 10:
        return f"{value_s:.2f} s"
    if round(value_s, 1) < 60:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    if whole < HOUR_S:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def _digits(value: float) -> str:
    """About three digits, never with an exponent: `0.0123`, `12.3`, `1,234`; `0` of less than _LEAST_SHOWN."""
    if abs(value) < _LEAST_SHOWN:
        return "0"
    return f"{value:,.0f}" if abs(value) >= _FOUR_DIGITS else f"{value:.3g}"


# Numbers as people read them: each with its unit, and a word where there is none.

NONE = "n/a"
_THOUSANDS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float | None, unit: str = "") -> str:
    """A whole number with thousands separated by commas: `12,345 tokens`, `1 token`; `unit` is the plural."""
    if value is None:
        return NONE
    whole = round(value)
    return _with_unit(f"{whole:,}", _singular(unit) if whole == 1 else unit)


def compact(value: float | None, unit: str = "") -> str:
    """Three significant digits and a prefix: `1.23 M tokens`."""
    return NONE if value is None else _with_unit(" ".join(_scaled(value)).strip(), unit)


def size(value_bytes: float | None) -> str:
    """Bytes as `14.5 MB`, with decimal prefixes."""
    if value_bytes is None:
        return NONE
    digits, prefix = _scaled(value_bytes)
    return f"{digits} {prefix}B"


def seconds(value_s: float | None) -> str:
    """A duration: `8.4 s`, `2 min 05 s`, `1 h 03 min`."""
    if value_s is None:
        return NONE
    if value_s < 59.95:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def real(value: float | None, unit: str = "", decimals: int = 3) -> str:
    """A number with fixed decimals: `2.104 nats/token`."""
    return NONE if value is None else _with_unit(f"{value:,.{decimals}f}", unit)


def rounded(value: float | None, unit: str = "") -> str:
    """About three digits, never a prefix: `2,061`, `11.1`."""
    return NONE if value is None else _with_unit(count(value) if abs(value) >= 999.5 else _three_digits(value), unit)


def small(value: float | None, unit: str = "") -> str:
    """A number that may be tiny: `3.1e-07`."""
    return NONE if value is None else _with_unit(f"{value:.3g}", unit)


def percent(value: float | None) -> str:
    """A fraction as `97.3 %`."""
    return NONE if value is None else f"{100 * value:.1f} %"


def signed(value: float | None) -> str:
    """A deviation as `+14.0 %`."""
    return NONE if value is None else f"{100 * value:+.1f} %"


def amount(value: float | None, kind: str) -> str:
    """A figure of the plan, by its kind: s, bytes, memory, tokens/s, fraction, GPU hours."""
    known = {"s": brief, "bytes": size, "memory": gib, "fraction": percent, "GPU hours": rounded}
    return known[kind](value) if kind in known else compact(value, kind)


def rate(value: float | None, name: str) -> str:
    """What a machine does, by the end of the rate's name: `_flop_s`, `_bytes_s`, or `_s` for a time."""
    if value is None or not name.endswith(("_flop_s", "_bytes_s")):
        return brief(value)
    return f"{compact(value)}FLOP/s" if name.endswith("_flop_s") else f"{size(value)}/s"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _singular(unit: str) -> str:
    """`micro-batch` of `micro-batches`, `part of the model` of `parts of the model`; a rate stays as it is."""
    if "/" in unit:
        return unit
    noun, of, whole = unit.partition(" of ")
    return noun.removesuffix("es" if noun.endswith("ches") else "s") + of + whole


def _with_unit(text: str, unit: str) -> str:
    return f"{text} {unit}" if unit else text


def _scaled(value: float) -> tuple[str, str]:
    """Three significant digits, and the prefix that goes with them."""
    for scale, prefix in _THOUSANDS:
        if abs(value) >= scale * 0.9995:
            return _three_digits(value / scale), prefix
    return _three_digits(value), ""


def _three_digits(value: float) -> str:
    if value == round(value) and abs(value) < 1000:
        return f"{value:.0f}"
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"
