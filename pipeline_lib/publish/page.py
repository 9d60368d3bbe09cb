"""Renders the report: one HTML file that needs no network and trusts nothing that it shows.

Model output, user data and file names are hostile: Jinja escapes all of them, the figures' data is JSON that
cannot close its element, and the page's content security policy runs only the two scripts hashed into it
and lets the browser fetch nothing.
"""

import base64
import hashlib
from collections.abc import Callable
from typing import Any

from bokeh.resources import Resources
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline_lib.base.manifest import Manifest
from pipeline_lib.publish import units
from pipeline_lib.publish.attempts import attempts_of
from pipeline_lib.publish.curves import Curves
from pipeline_lib.publish.facts import Facts
from pipeline_lib.publish.figures import figures_json, figures_of
from pipeline_lib.publish.forecast import SETTLING_STEPS, beyond, settled, verdict
from pipeline_lib.publish.planned import Plan, Prediction

LIMITS = {"words": 12, "sources": 20, "samples": 20, "generations": 24, "attempts": 40, "events": 60, "losses": 30}
MAX_CHARS = 3000
SHOWN_VERSIONS = ("code", "python", "torch", "transformers", "tokenizers")


def render(facts: Facts, curves: Curves) -> str:
    """The page as text."""
    environment = _environment()
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    scripts = [bokeh, environment.get_template("embed.js.jinja").render()]
    events = _event_rows(facts)
    figures = figures_of(facts, curves)
    return environment.get_template("page.html.jinja").render(
        facts=facts,
        curves=curves,
        limits=LIMITS,
        settling_steps=SETTLING_STEPS,
        stages=_stage_rows(facts),
        losses=_loss_rows(facts),
        ways=_way_rows(facts.plan),
        compared=facts.compared,
        compared_text=verdict(facts.compared),
        settled_steps=len(settled(facts.planned_steps)),
        attempts=attempts_of(facts.events)[-LIMITS["attempts"] :],
        events=events[-LIMITS["events"] :],
        event_count=len(events),
        figures=figures,
        figures_json=_json_markup(figures_json(figures)),
        scripts=[Markup(script) for script in scripts],  # noqa: S704  Bokeh's and our own, no user's text in them
        script_hashes=[_csp_hash(script) for script in scripts],
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("pipeline_lib.publish"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: tuple[Callable[..., str], ...] = (
        *(units.count, units.compact, units.rounded, units.real, units.small),
        *(units.size, units.seconds, units.percent, clip),
        *(units.brief, units.gib, units.signed, units.amount, units.rate, beyond),
    )
    environment.filters.update({show.__name__: show for show in filters})
    return environment


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """`text`, or its beginning and how much is not shown."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def _stage_rows(facts: Facts) -> list[dict[str, Any]]:
    longest = max((manifest.duration_s for manifest in facts.manifests.values()), default=0.0) or 1.0
    return [
        {
            "part": part,
            "manifest": manifest,
            "share": 100 * manifest.duration_s / longest,
            "versions": _versions_text(manifest),
        }
        for part, manifest in facts.manifests.items()
    ]


def _versions_text(manifest: Manifest) -> str:
    return ", ".join(f"{name} {manifest.versions[name]}" for name in SHOWN_VERSIONS if name in manifest.versions)


def _way_rows(plan: Plan) -> list[dict[str, Any]]:
    """What was foreseen of each strategy at its best: the chosen one, then the others, the fastest first."""
    chosen = plan.chosen.strategy or "chosen"
    others = [(name, way) for name, way in plan.others.items() if name != chosen]
    others.sort(key=lambda each: each[1].step_s.value or float("inf"))
    ways = [(f"{chosen}, chosen", plan.prediction), *others] if plan.has_prediction else []
    return [{"name": name, "way": way, "placement": _placement_text(way)} for name, way in ways]


def _placement_text(way: Prediction) -> str:
    """`2 x 4 blocks, selective recompute`: micro-batch and accumulation, and whatever saves memory."""
    placed = way.changes
    found = []
    if placed.micro_batch_blocks and way.accumulation:
        found.append(f"{placed.micro_batch_blocks} x {way.accumulation} blocks")
    if placed.shard_ranks:
        found.append(f"spread over {placed.shard_ranks} ranks")
    if placed.recompute not in (None, "none"):
        found.append(f"{placed.recompute} recompute")
    if placed.offload not in (None, "none"):
        found.append(f"offload of {placed.offload}")
    return ", ".join(found) or units.NONE


def _loss_rows(facts: Facts) -> list[dict[str, Any]]:
    """What was not used, by source and reason, the largest numbers first."""
    rows = [
        {"source": source.name, "fate": fate, "reason": reason, "number": number, "unit": unit}
        for source in facts.ledger.sources
        for fate, unit, reasons in (
            ("quarantined", "rows", source.quarantined),
            ("dropped", "rows", {"duplicates": source.duplicates_dropped or 0}),
            ("dropped", "samples", source.dropped),
        )
        for reason, number in reasons.items()
        if number
    ]
    return sorted(rows, key=lambda row: -row["number"])


def _event_rows(facts: Facts) -> list[dict[str, Any]]:
    """Every event but the steps' own, with its time since the first one and its fields as text."""
    named = [event for event in facts.events if event.get("event") not in ("step.begin", "step.end")]
    start = next((event["at"] for event in named if isinstance(event.get("at"), (int, float))), 0.0)
    known = {"at", "monotonic_s", "event"}
    return [
        {
            "after_s": event["at"] - start if isinstance(event.get("at"), (int, float)) else None,
            "name": str(event.get("event", "unnamed")),
            "fields": ", ".join(_field_text(key, value) for key, value in event.items() if key not in known),
        }
        for event in named
    ]


def _field_text(key: str, value: Any) -> str:
    if isinstance(value, (int, float)) and key.endswith("bytes"):
        return units.size(value)
    if isinstance(value, float) and key.endswith("_s"):
        return f"{key.removesuffix('_s')} {units.seconds(value)}"
    return f"{key} {value}"


def _json_markup(text: str) -> Markup:
    """JSON that cannot end the script element around it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  no markup is left in it


def _csp_hash(script: str) -> str:
    """How a content security policy names an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
