"""From measured seconds to costs and rates: fits through few points, and spread of runs."""

import statistics
from collections.abc import Sequence

import numpy as np

from pipeline_lib.plan.machine import Pass

LEAST_SPREAD = 0.03  # relative; the day-to-day variation of one machine
# a run of at most this multiple of the few-token run's time is bound by the host, not the device
HOST_BOUND = 1.2
_LEAST_LATENCY_S = 1e-7


def pass_of(tokens: tuple[int, int], tiny_s: float, half_s: float, full_s: float) -> Pass:
    """Return a pass's cost from three runs: a short one, bound by the host, and two of `tokens`.

    `tokens` are the token counts (half, full) of the last two runs. The cost is the line through
    these two if its slope is positive, its intercept is not negative, and the half run is not
    host-bound; else it is proportional to tokens.
    """
    tiny_s = max(0.0, tiny_s)
    half_s = max(0.0, half_s)
    full_s = max(0.0, full_s)
    half, full = tokens
    per_token_s = (full_s - half_s) / (full - half)
    fixed_s = full_s - per_token_s * full
    if half_s <= HOST_BOUND * tiny_s or per_token_s <= 0 or fixed_s < 0:
        return Pass(0.0, full_s / full, tiny_s)
    return Pass(fixed_s, per_token_s, tiny_s)


def link_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return (bandwidth in bytes/s, latency in s), fitted to t = latency + bytes / bandwidth.

    `points` are (bytes, seconds) of at least two sizes. The fit minimizes the sum of squared
    relative errors.
    """
    sizes = np.array([size for size, _ in points], np.float64)
    seconds = np.array([took for _, took in points], np.float64)
    weights = 1 / seconds**2
    mean_size = np.average(sizes, weights=weights)
    mean_s = np.average(seconds, weights=weights)
    beside = sizes - mean_size
    slope = np.sum(weights * beside * (seconds - mean_s)) / np.sum(weights * beside**2)
    latency_s = mean_s - slope * mean_size
    if slope <= 0 or latency_s <= 0:  # the latency is lost in the noise
        is_largest = sizes == sizes.max()
        slope = np.median(seconds[is_largest] / sizes[is_largest])
        latency_s = max(_LEAST_LATENCY_S, np.min(seconds - slope * sizes))
    return float(1 / slope), float(latency_s)


def rate_of(values: Sequence[float], least_spread: float = LEAST_SPREAD) -> dict[str, float]:
    """Return the repetitions' median as `value`, and a band from `low` to `high` around all.

    The band extends from the median by at least a factor of 1 + `least_spread` in each direction.
    """
    value = statistics.median(values)
    low = min(*values, value / (1 + least_spread))
    high = max(*values, value * (1 + least_spread))
    return {"value": value, "low": low, "high": high}
