"""How far two curves of losses are apart, and whether that is rounding."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

# a share of the steps, and no fewer: one alone is as noisy as its blocks
LATE = 0.1
LATE_STEPS = 10
AS_NOISY = 2.0  # ours may be so many times as far from fp32 as the plain loop in bf16 is
EXACT = 1e-4  # relative, in fp32


@dataclass(frozen=True)
class Apart:
    """|difference| of two curves over equal steps, nats a token; `relative` is by its loss."""

    most: float
    mean: float
    last: float
    late_mean: float
    relative: float


def apart(curve: Sequence[float], reference: Sequence[float]) -> Apart:
    """Of `curve` from `reference`."""
    away = [abs(one - other) for one, other in zip(curve, reference, strict=True)]
    late = away[-max(LATE_STEPS, round(LATE * len(away))) :]
    relative = max(each / loss for each, loss in zip(away, reference, strict=True))
    return Apart(max(away), sum(away) / len(away), away[-1], sum(late) / len(late), relative)


def verdict(ours: Apart, noise: Apart) -> str:
    """Whether ours is the truth but for rounding. The last step alone is shown and not judged."""
    ratios = {
        name: getattr(ours, name) / max(getattr(noise, name), 1e-12)
        for name in ("most", "mean", "late_mean")
    }
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    is_noise = all(ratio <= AS_NOISY for ratio in ratios.values())
    return (
        f"{'within' if is_noise else 'NOT within'} {AS_NOISY:g} times bf16's noise (times the "
        f"noise: {words})"
    )


def exact_verdict(ours: Apart) -> str:
    """In fp32."""
    is_exact = ours.relative < EXACT
    return (
        f"fp32: largest relative difference {ours.relative:.1e}, "
        f"{'below' if is_exact else 'NOT below'} {EXACT:g}"
    )


def cells(name: str, found: Apart) -> list[str]:
    """A line of the table."""
    return [name, *(f"{value:.1e}" for value in asdict(found).values())]
