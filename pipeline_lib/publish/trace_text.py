"""A traced chain as a tree for people, and as JSON for machines."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from pipeline_lib.base.redact import one_line, redact
from pipeline_lib.base.stage import Say
from pipeline_lib.publish.attempts import Attempt
from pipeline_lib.publish.lineage import CODE, Link, attempt_text, code_text
from pipeline_lib.publish.traced import DAMAGED, RECORDED, REMADE, SAME_SIZES, VERIFIED, Traced
from pipeline_lib.publish.units import seconds

STYLES = {VERIFIED: "green", SAME_SIZES: "green", RECORDED: "yellow", REMADE: "yellow", DAMAGED: "bold red"}
NAME_CHARS = 11
_TOLD_BY_ORIGIN = frozenset({"kind", "source", "name", "revision", "content"})


def show(root: Traced, stream: TextIO) -> None:
    """Write the tree to `stream`, a line for each fact."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in _tree(root, "", "", {}):
        console.print(line, soft_wrap=True)
    states = [traced.state for traced in root.walk()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(Text(f"\n{len(states)} links: {counts}"), soft_wrap=True)


def to_json(root: Traced) -> str:
    """The same as nested objects, of keys that stay; credentials masked."""
    return redact(json.dumps(_object(root), indent=2))


def problems_of(root: Traced) -> list[str]:
    """All that is wrong in a chain."""
    return [one_line(problem) for traced in root.walk() for problem in traced.problems]


@contextmanager
def told_on(stream: TextIO) -> Iterator[Say]:
    """A voice that tells on a terminal what is going on, and leaves no trace; elsewhere it is silent."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(one_line(text)))


def facts_of(link: Link, settings: Mapping[str, Any], above: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What is known of a link, by name; of its versions those that differ from those `above` it."""
    made = [link.started_at, f"in {seconds(link.duration_s)}"]
    made += [f"on {link.machine}"] if link.machine else []
    made += [f"in SLURM job {link.job}"] if link.job else []
    yield "made", ", ".join(made)
    if not above or link.versions.get(CODE) != above.get(CODE):
        yield CODE, code_text(link.versions)
    others = {name: version for name, version in link.versions.items() if name != CODE and above.get(name) != version}
    if others:
        yield "versions", ", ".join(f"{name} {version}" for name, version in others.items())
    left_out = _TOLD_BY_ORIGIN if link.stage == "download" else frozenset()
    if shown := {key: value for key, value in settings.items() if key not in left_out}:
        yield "settings", ", ".join(f"{key}: {_value(value)}" for key, value in shown.items())
    for origin in link.sources[:1]:
        yield "source", origin
    for file in link.sources[1:]:
        yield "file", file
    for attempt in link.attempts:
        yield f"attempt {attempt.number}", attempt_text(attempt)


def _tree(traced: Traced, first: str, rest: str, above: Mapping[str, str]) -> Iterator[Text]:
    """The lines of a link and of all below it; they begin with `first`, all but the first with `rest`."""
    head = Text(first, "dim").append(one_line(f"{traced.part} {traced.ref.digest}"), "not dim bold").append("  ")
    yield head.append(traced.state, STYLES.get(traced.state, "yellow"))
    bar = rest + ("│  " if traced.inputs else "   ")
    versions = dict(above)
    if traced.link is not None:
        for name, text in facts_of(traced.link, traced.settings, above):
            yield Text(bar, "dim").append(_fact(name, text), "not dim")
        versions = dict(traced.link.versions)
    yield Text(bar, "dim").append(_fact("manifest", f"sha256:{traced.manifest_sha256}"), "not dim")
    for note in traced.notes:
        yield Text(bar, "dim").append(one_line(note), "yellow")
    for problem in traced.problems:
        yield Text(bar, "dim").append(one_line(problem), "bold red")
    for below in traced.inputs:
        is_last = below is traced.inputs[-1]
        yield from _tree(below, rest + ("└─ " if is_last else "├─ "), rest + ("   " if is_last else "│  "), versions)


def _fact(name: str, text: str) -> str:
    return f"{name:<{NAME_CHARS}}{one_line(text)}"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _object(traced: Traced) -> dict[str, Any]:
    link = traced.link
    known: dict[str, Any] = {}
    if link is not None:
        known = {
            "settings": dict(traced.settings),
            "sources": link.sources,
            "versions": dict(link.versions),
            "machine": link.machine,
            "job": link.job,
            "started_at": link.started_at,
            "duration_s": link.duration_s,
            "restarts": link.restarts,
            "attempts": [_attempt_object(attempt) for attempt in link.attempts],
        }
    return {
        "part": traced.part,
        "stage": traced.ref.stage,
        "digest": traced.ref.digest,
        "state": traced.state,
        "manifest_sha256": traced.manifest_sha256,
        **known,
        "notes": traced.notes,
        "problems": traced.problems,
        "made_from": _objects(traced.inputs),
    }


def _attempt_object(attempt: Attempt) -> dict[str, Any]:
    return {"number": attempt.number, "place": attempt.place, "first_step": attempt.first_step, "end": attempt.end}


def _objects(inputs: Sequence[Traced]) -> list[dict[str, Any]]:
    return [_object(traced) for traced in inputs]
