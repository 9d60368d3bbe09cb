"""Units: the one place where bits become bytes, and where giga, which is 10^9, meets gibi, which is 2^30.

Everywhere else a quantity is bytes, seconds, FLOPs, or one of them a second, and its name ends in its unit.
"""

BITS = 8  # in a byte
GIGA = 10**9
TERA = 10**12
MIB = 2**20
GIB = 2**30
HOUR_S = 3600
_FOUR_DIGITS = 999.5  # what `.3g` rounds to 1e+03


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
    """`12.3 GiB`, or MiB below one of them: as the driver and torch count."""
    mebi = round(size_bytes / MIB, 1)
    return f"{size_bytes / GIB:.1f} GiB" if abs(mebi) >= GIB // MIB else f"{mebi:.1f} MiB"


def gigabytes(size_bytes: float) -> str:
    """`12.30 GB`, or MB below one of them: as files and networks count."""
    mega = round(size_bytes / 10**6, 1)
    return f"{size_bytes / GIGA:.2f} GB" if abs(mega) >= 1000 else f"{mega:.1f} MB"


def gbit_per_s(bytes_per_s: float) -> str:
    """`9 Gbit/s`, `3,200 Gbit/s`."""
    rate = to_gbit_per_s(bytes_per_s)
    return f"{rate:,.0f} Gbit/s" if rate >= _FOUR_DIGITS else f"{rate:.3g} Gbit/s"


def seconds(value_s: float) -> str:
    """`12 ms`, `1.24 s`, `3 min 05 s`, `2 h 10 min`."""
    if value_s * 1000 < _FOUR_DIGITS:
        return f"{value_s * 1000:.3g} ms"
    if round(value_s, 2) < 10:
        return f"{value_s:.2f} s"
    if round(value_s, 1) < 60:
        return f"{value_s:.1f} s"
    whole = round(value_s)
    if whole < HOUR_S:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(value_s / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"
