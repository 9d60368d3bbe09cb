"""The strategies over the network: tables, ranking, and how much of one node's speed is kept."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from benchmarks.comparison import beside, figures, number, percent
from benchmarks.groups import Row
from benchmarks.network_cases import Bench, Key
from pipeline_lib.core.files import write_json, write_text
from pipeline_lib.core.units import GIGA
from pipeline_lib.plan.predict import Prediction

TIME_GOAL, AS_FAST = 0.15, 0.05
KEPT_GOAL, KEPT_GBIT_S = 0.85, 10.0  # of one node's speed per GPU, at that rate
PHASES = ("forward_s", "backward_s", "update_s")
COLUMNS = (
    *(
        "strategy",
        "Gbit/s",
        "micro-batches",
        "step s predicted",
        "measured",
        "error",
        "forward/backward/update",
    ),
    *("GB sent predicted", "measured", "tokens/s/GPU", "of one node", ""),
)


def leave(
    out: Path, bench: Bench, predicted: Mapping[Key, Prediction], rows: Mapping[Key, Row]
) -> str:
    """Write down what is known so far; the table with what follows from it."""
    results = with_shares(
        [compared(key, each, bench, rows.get(key)) for key, each in predicted.items()]
    )
    places = list(dict.fromkeys((row["gbit_s"], row["accumulation"]) for row in results))
    lines = [
        line for place in places for line in [*ranking(results, *place), *kept(results, *place)]
    ]
    text = "\n".join([*table(results), "", *lines])
    write_json(out / "results.json", results)
    write_text(out / "table.md", text + "\n")
    return text


def compared(key: Key, prediction: Prediction, bench: Bench, row: Row | None) -> Row:
    """A prediction beside what came of it.

    Where nothing was measured, the speed is the predicted one.
    """
    row = row or {"skipped": "predicted only"}
    step_s, tokens = row.get("step_s"), bench.rank_tokens(key.accumulation)
    return {
        **vars(key),
        "problem": row.get("problem"),
        "skipped": row.get("skipped"),
        "layers": bench.config.get("num_hidden_layers"),
        "time": beside(prediction.step_s, step_s),
        "sent": beside(
            prediction.network_bytes, row.get("sent_bytes") or None
        ),  # one node alone may send nothing
        "phases": {phase: beside(getattr(prediction, phase), row.get(phase)) for phase in PHASES},
        "tokens_per_s": tokens / (step_s or prediction.step_s.value),
        "is_measured": step_s is not None,
        "bound": prediction.bound,
        "measured": row,
    }


def with_shares(results: list[Row]) -> list[Row]:
    """Each with its share of one node's best speed per GPU, whatever its micro-batches."""
    alone = [row for row in results if row["gbit_s"] is None]
    known = [row for row in alone if row["is_measured"]] or alone
    best = max(row["tokens_per_s"] for row in known)
    return [{**row, "share": row["tokens_per_s"] / best} for row in results]


def table(results: Sequence[Row]) -> list[str]:
    """For people; what was not measured is in brackets."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results:
        took, sent = row["time"], row["sent"]
        phases = "/".join(percent(phase["error"]) for phase in row["phases"].values())
        place = "one node" if row["gbit_s"] is None else f"{row['gbit_s']:g}"
        speed = f"{row['tokens_per_s']:,.0f}", f"{row['share']:.1%}"
        cells = [
            row["name"],
            place,
            str(row["accumulation"]),
            figures(took, 1, 2),
            number(took["measured"], 1, 2),
        ]
        cells += [
            percent(took["error"]),
            phases,
            number(sent["value"], GIGA, 2),
            number(sent["measured"], GIGA, 2),
        ]
        cells += speed if row["is_measured"] else [f"({each})" for each in speed]
        size = f"{row['layers']} layers" if row["layers"] else ""
        cells.append(
            ", ".join(filter(None, [size, str(row["problem"] or row["skipped"] or "")[:60]]))
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _measured(results: Sequence[Row], gbit_s: float | None, accumulation: int) -> list[Row]:
    places = [
        row for row in results if (row["gbit_s"], row["accumulation"]) == (gbit_s, accumulation)
    ]
    return [row for row in places if row["is_measured"]]


def ranking(results: Sequence[Row], gbit_s: float | None, accumulation: int) -> list[str]:
    """The strategies at one rate from the fastest to the slowest, as predicted and as measured."""
    known = _measured(results, gbit_s, accumulation)
    if len(known) < 2 or gbit_s is None:
        return []
    agree, wrong = 0, []
    pairs = list(combinations(known, 2))
    for one, other in pairs:
        predicted = one["time"]["value"] - other["time"]["value"]
        times = one["time"]["measured"], other["time"]["measured"]
        agree += 1 if predicted * (times[0] - times[1]) > 0 else -1
        if predicted * (times[0] - times[1]) <= 0 and max(times) > min(times) * (1 + AS_FAST):
            wrong.append(f"{one['name']} / {other['name']}")
    orders = [
        " < ".join(row["name"] for row in sorted(known, key=lambda row: row["time"][key]))
        for key in ("value", "measured")
    ]
    good = sum(abs(row["time"]["error"]) <= TIME_GOAL for row in known)
    verdict = "right" if not wrong else f"WRONG for {'; '.join(wrong)}"
    return [
        f"{gbit_s:g} Gbit/s, {accumulation} micro-batches: {good} of {len(known)} within "
        f"{TIME_GOAL:.0%}; ranking {verdict} (Kendall's tau {agree / len(pairs):.2f})",
        f"  predicted: {orders[0]}",
        f"  measured:  {orders[1]}",
    ]


def kept(results: Sequence[Row], gbit_s: float | None, accumulation: int) -> list[str]:
    """What the best and the worst of the measured keep of one node's speed."""
    known = sorted(_measured(results, gbit_s, accumulation), key=lambda row: float(row["share"]))
    if not known or gbit_s is None:
        return []
    worst, best = known[0], known[-1]
    goal = ""
    if gbit_s == KEPT_GBIT_S:
        goal = (
            f" (the goal is {KEPT_GOAL:.0%}: "
            f"{'reached' if best['share'] >= KEPT_GOAL else 'NOT reached'})"
        )
    return [
        f"  kept of one node's speed: {best['name']} {best['share']:.1%}{goal}, {worst['name']} "
        f"{worst['share']:.1%}"
    ]
