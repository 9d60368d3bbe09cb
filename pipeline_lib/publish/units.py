"""Numbers as people read them: each with its unit, and a word where there is none."""

from collections.abc import Sequence

from pipeline_lib.plan import units as plan_units

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


def brief(value_s: float | None) -> str:
    """A duration that may be short: `12 ms`, `1.24 s`, `3 min 05 s`."""
    return NONE if value_s is None else plan_units.seconds(value_s)


def gib(value_bytes: float | None) -> str:
    """Memory of a device in GiB or MiB, as its driver counts."""
    return NONE if value_bytes is None else plan_units.gib(value_bytes)


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
