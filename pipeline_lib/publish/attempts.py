"""What became of each attempt at a training: where it ran, from which step, and what ended it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks. `first_step` is the step that it went on from, 0 from the start."""

    number: int
    place: str
    first_step: int
    end: str


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
            )
        )
    return found


def _place(launched: Event) -> str:
    """`4 ranks by srun on n1, n2 in SLURM job 7`."""
    text = f"{launched.get('ranks', '?')} ranks by {launched.get('launcher', '?')}"
    if nodes := launched.get("nodes"):
        text += f" on {', '.join(map(str, nodes))}"
    return f"{text} in SLURM job {launched['job']}" if launched.get("job") else text


def _end(own: Sequence[Event]) -> str:
    """The culprits first, whom the ranks themselves can only miss."""
    causes = [_lost(event) for event in _named(own, "rank.lost")] + [
        _hang(event) for event in _named(own, "flight.read")
    ]
    if next(_named(own, "run.end"), None) is not None:
        return "done"
    requeued = next(_named(own, "run.requeued"), None)
    if requeued is not None:
        reason = "; ".join(causes) or str(requeued.get("reason", "interrupted")).splitlines()[0]
        return f"{reason}; queued again at step {requeued.get('step', '?')}"
    return "; ".join(causes) or "interrupted without a word: killed, or its node lost"


def _lost(event: Event) -> str:
    """`rank 1 on n2 was silent for 12 s, in step 41`."""
    silent_s = event.get("silent_s")
    since = f" for {silent_s:.0f} s" if isinstance(silent_s, int | float) else ""
    return f"rank {event.get('rank')} on {event.get('host')}: {event.get('why')}{since}, {_doing(event)}"


def _doing(event: Event) -> str:
    return f"in step {event['step']}" if event.get("step") else str(event.get("doing", "starting"))


def _hang(event: Event) -> str:
    return "by NCCL's flight recorder, " + ", ".join(
        f"{key} {value}" for key, value in event.items() if key not in ("at", "monotonic_s", "event", "attempt")
    )


def _named(events: Iterable[Event], name: str) -> Iterator[Event]:
    return (event for event in events if event.get("event") == name)
