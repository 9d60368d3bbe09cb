"""The trace as a tree for people, and as JSON for programs."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from pipeline_lib.core.stage import Say
from pipeline_lib.core.text import one_line, redact
from pipeline_lib.core.units import seconds
from pipeline_lib.lineage.checks import DAMAGED, RECORDED, REMADE, SAME_SIZES, VERIFIED, Traced
from pipeline_lib.lineage.record import (
    CODE,
    LineageLink,
    attempt_text,
    code_text,
)

STYLES = {
    VERIFIED: "green",
    SAME_SIZES: "green",
    RECORDED: "yellow",
    REMADE: "yellow",
    DAMAGED: "bold red",
}
NAME_CHARS = 11
_IN_ORIGIN = frozenset({"kind", "source", "name", "revision", "content"})


def show(root: Traced, stream: TextIO) -> None:
    """Write the tree to `stream`, one line per fact."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    for line in _tree(root, "", "", {}):
        console.print(line, soft_wrap=True)
    states = [traced.state for traced in root.walk()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    console.print(Text(f"\n{len(states)} links: {counts}"), soft_wrap=True)


def to_json(root: Traced) -> str:
    """Return the trace as JSON: nested objects with stable keys, credentials masked."""
    return redact(json.dumps(_object(root), indent=2))


def problems_of(root: Traced) -> list[str]:
    """Return all problems in a trace."""
    return [one_line(problem) for traced in root.walk() for problem in traced.problems]


@contextmanager
def status_line_on(stream: TextIO) -> Iterator[Say]:
    """Yield a `say` that shows a transient status on a terminal; elsewhere it prints nothing."""
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda text: status.update(Text(one_line(text)))


def facts_of(
    link: LineageLink, settings: Mapping[str, Any], above: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the facts of a link by name; of its versions only those that differ from `above`."""
    made = [link.started_at, f"in {seconds(link.duration_s)}"]
    if link.machine:
        made.append(f"on {link.machine}")
    if link.job:
        made.append(f"in SLURM job {link.job}")
    yield "made", ", ".join(made)
    if not above or link.versions.get(CODE) != above.get(CODE):
        yield CODE, code_text(link.versions)
    others = []
    for name, version in link.versions.items():
        if name != CODE and above.get(name) != version:
            others.append(f"{name} {version}")
    if others:
        yield "versions", ", ".join(others)
    texts = []
    for key, value in settings.items():
        if link.stage == "download" and key in _IN_ORIGIN:
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        texts.append(f"{key}: {text}")
    if texts:
        yield "settings", ", ".join(texts)
    for origin in link.sources[:1]:
        yield "source", origin
    for file in link.sources[1:]:
        yield "file", file
    for attempt in link.attempts:
        yield f"attempt {attempt.number}", attempt_text(attempt)


def _tree(traced: Traced, first: str, rest: str, above: Mapping[str, str]) -> Iterator[Text]:
    """Yield the lines of a link and those below; the first has prefix `first`, others `rest`."""
    head = Text(first, "dim")
    head.append(one_line(f"{traced.part} {traced.ref.digest}"), "not dim bold")
    head.append("  ")
    head.append(traced.state, STYLES.get(traced.state, "yellow"))
    yield head
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
        if below is traced.inputs[-1]:
            yield from _tree(below, f"{rest}└─ ", f"{rest}   ", versions)
        else:
            yield from _tree(below, f"{rest}├─ ", f"{rest}│  ", versions)


def _fact(name: str, text: str) -> str:
    return f"{name:<{NAME_CHARS}}{one_line(text)}"


def _object(traced: Traced) -> dict[str, Any]:
    link = traced.link
    known: dict[str, Any] = {}
    if link is not None:
        attempts = []
        for one in link.attempts:
            attempt = dict(vars(one))
            del attempt["job"]
            attempts.append(attempt)
        known = {
            "settings": dict(traced.settings),
            "sources": link.sources,
            "versions": dict(link.versions),
            "machine": link.machine,
            "job": link.job,
            "started_at": link.started_at,
            "duration_s": link.duration_s,
            "restarts": link.restarts,
            "attempts": attempts,
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
        "made_from": [_object(below) for below in traced.inputs],
    }
