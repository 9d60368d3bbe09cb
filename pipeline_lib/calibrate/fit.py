"""From seconds to costs and rates: lines through a few points, and how far repetitions are apart."""

import statistics
from collections.abc import Sequence

from pipeline_lib.plan.machine import Pass

LEAST_SPREAD = 0.03  # of a rate: what the same machine differs by from one day to the next
HOST_BOUND = 1.2  # a run that takes at most so many times as long as that of a few tokens says nothing of the device
_LEAST_LATENCY_S = 1e-7


def pass_of(tokens: tuple[int, int], tiny_s: float, half_s: float, full_s: float) -> Pass:
    """The cost of a pass from three runs: of a few tokens, where the host decides, and of `tokens` (half, full).

    The line through the last two, if it has a part of the tokens and a fixed one; else in proportion to the tokens.
    """
    tiny_s, half_s, full_s = max(0.0, tiny_s), max(0.0, half_s), max(0.0, full_s)
    half, full = tokens
    per_token_s = (full_s - half_s) / (full - half)
    fixed_s = full_s - per_token_s * full
    if half_s <= HOST_BOUND * tiny_s or per_token_s <= 0 or fixed_s < 0:
        return Pass(0.0, full_s / full, tiny_s)
    return Pass(fixed_s, per_token_s, tiny_s)


def link_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bandwidth in bytes a second, and latency in seconds, of t = latency + bytes / bandwidth.

    `points` are (bytes, seconds), of two sizes or more; the sum of the squares of relative errors is the smallest.
    """
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True)) / spread
    latency_s = mean_t - slope * mean_x
    if slope <= 0 or latency_s <= 0:  # what there is of a latency is lost in the noise
        most_bytes = max(x for x, _ in points)
        slope = statistics.median(t / x for x, t in points if x == most_bytes)
        latency_s = max(_LEAST_LATENCY_S, min(t - slope * x for x, t in points))
    return 1 / slope, latency_s


def rate_of(values: Sequence[float], least_spread: float = LEAST_SPREAD) -> dict[str, float]:
    """The median of repetitions, and the band that holds all of them and is not narrower than `least_spread`."""
    value = statistics.median(values)
    low, high = min(*values, value / (1 + least_spread)), max(*values, value * (1 + least_spread))
    return {"value": value, "low": low, "high": high}
