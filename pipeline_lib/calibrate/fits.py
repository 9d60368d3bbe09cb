"""From measured seconds to costs and rates: fits through few points, and spread of runs."""

import statistics
from collections.abc import Sequence

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
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True))
        / spread
    )
    latency_s = mean_t - slope * mean_x
    if slope <= 0 or latency_s <= 0:  # the latency is lost in the noise
        most_bytes = max(x for x, _ in points)
        slope = statistics.median(t / x for x, t in points if x == most_bytes)
        latency_s = max(_LEAST_LATENCY_S, min(t - slope * x for x, t in points))
    return 1 / slope, latency_s


def rate_of(values: Sequence[float], least_spread: float = LEAST_SPREAD) -> dict[str, float]:
    """Return the repetitions' median as `value`, and a band from `low` to `high` around all.

    The band extends from the median by at least a factor of 1 + `least_spread` in each direction.
    """
    value = statistics.median(values)
    low = min(*values, value / (1 + least_spread))
    high = max(*values, value * (1 + least_spread))
    return {"value": value, "low": low, "high": high}
