"""What became of each attempt at a training: where it ran, from which step, and what ended it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.base.errors import CONTINUES

Event = Mapping[str, Any]
_ENDS = ("run.end", "run.interrupted", "run.failed", "run.requeued", "run.requeue_refused")


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks, of a SLURM `job`. `first_step` is the step that it went on from, 0 from the start."""

    number: int
    place: str
    first_step: int
    end: str
    job: str = ""


def attempts_of(events: Sequence[Event]) -> list[Attempt]:
    """Those that left the event `run.launched`, in order."""
    found = []
    for event in events:
        number = event.get("attempt")
        if event.get("event") != "run.launched" or not isinstance(number, int):
            continue
        own = [other for other in events if other.get("attempt") == number]
        resumed = next(_named(own, "run.resumed"), {}).get("step")
        found.append(
            Attempt(
                number=number,
                place=_place(event),
                first_step=resumed if isinstance(resumed, int) else 0,
                end=_end(own),
                job=str(event.get("job") or ""),
            )
        )
    return found


def _place(launched: Event) -> str:
    """`4 ranks by srun on n1, n2 in SLURM job 7`."""
    text = f"{launched.get('ranks', '?')} ranks by {launched.get('launcher', '?')}"
    if isinstance(nodes := launched.get("nodes"), list) and nodes:
        text += f" on {', '.join(map(str, nodes))}"
    return f"{text} in SLURM job {launched['job']}" if launched.get("job") else text


def _end(own: Sequence[Event]) -> str:
    """By what came last of all that ends an attempt; the launcher's reason names whom the ranks themselves missed."""
    ends = [event for event in own if event.get("event") in _ENDS]
    last = ends[-1].get("event") if ends else None
    if last == "run.end":
        return "done"
    causes = list(filter(None, [_reason(ends), *map(_hang, _named(own, "flight.read"))]))
    told = "; ".join(causes) or "interrupted without a word: killed, or its node lost"
    if last == "run.requeued":
        return f"{told}; queued again at step {ends[-1].get('step', '?')}"
    return f"{told}; not queued again: {_first_line(ends[-1])}" if last == "run.requeue_refused" else told


def _reason(ends: Sequence[Event]) -> str:
    """Why it ended, without what was to be done then."""
    told = [event for event in ends if event.get("event") not in ("run.end", "run.requeue_refused")]
    return _first_line(told[0]).replace(f"; {CONTINUES}", "") if told else ""


def _first_line(event: Event) -> str:
    return str(event.get("reason") or "interrupted").splitlines()[0]


def _hang(event: Event) -> str:
    return "by NCCL's flight recorder, " + ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in ("at", "monotonic_s", "event", "attempt")
    )


def _named(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (event for event in events if event.get("event") == name)
