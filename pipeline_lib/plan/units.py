"""Units: the one place where bits become bytes, and where giga, which is 10^9, meets gibi, which is 2^30.

Everywhere else a quantity is bytes, seconds, FLOPs, or one of them a second, and its name ends in its unit.
"""

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


def gib(size_bytes: float) -> str:
    """`12.3 GiB`, or MiB and KiB below one of them: as the driver and torch count."""
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
    return f"{_three_digits(to_gbit_per_s(bytes_per_s))} Gbit/s"


def gpu_hours(value_h: float) -> str:
    """`0.0123 GPU-hours`, `48.5 GPU-hours`, `1,234 GPU-hours`."""
    return f"{_three_digits(value_h)} GPU-hours"


def seconds(value_s: float) -> str:
    """`0.05 ms`, `12 ms`, `1.24 s`, `3 min 05 s`, `2 h 10 min`; `0 ms` of less than half a microsecond."""
    if value_s * 1000 < _FOUR_DIGITS:
        return f"{_three_digits(value_s * 1000)} ms"
    if round(value_s, 2) < 10:
        return f"{value_s:.2f} s"
    if round(value_s, 1) < 60:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    if whole < HOUR_S:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def _three_digits(value: float) -> str:
    """About three digits, never with an exponent: `0.0123`, `12.3`, `1,234`; `0` of less than _LEAST_SHOWN."""
    if abs(value) < _LEAST_SHOWN:
        return "0"
    return f"{value:,.0f}" if abs(value) >= _FOUR_DIGITS else f"{value:.3g}"
