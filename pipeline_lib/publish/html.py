"""What every page is made of: one HTML file that needs no network and trusts nothing that it shows.

Model output, user data and file names are hostile: Jinja escapes all of them, the figures' data is JSON that
cannot close its element, and the page's content security policy runs only the two scripts hashed into it
and lets the browser fetch nothing.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.resources import Resources
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline_lib.publish import units
from pipeline_lib.publish.charts import Chart
from pipeline_lib.publish.forecast import beyond, unjudged

MAX_CHARS = 3000
_OWN_TEMPLATES = "pipeline_lib.publish"


def render_page(package: str, template: str, figures: Mapping[str, Chart], values: Mapping[str, Any]) -> str:
    """The page that `template` of `package` makes of `values`, by extending frame.html.jinja.

    `figures` are by the id of their place in the page, which the macro `figure` of parts.html.jinja makes.
    """
    made = environment(package)
    run = scripts()
    return made.get_template(template).render(
        **values,
        figures=figures,
        figures_json=json_markup(figures_json(figures)),
        scripts=[Markup(script) for script in run],  # noqa: S704  Bokeh's and our own, no user's text in them
        script_hashes=[csp_hash(script) for script in run],
    )


def environment(package: str = _OWN_TEMPLATES) -> Environment:
    """The templates of `package`, then those that all pages share, with the units as filters."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(_OWN_TEMPLATES)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: tuple[Callable[..., str], ...] = (
        *(units.count, units.compact, units.rounded, units.real, units.small),
        *(units.size, units.seconds, units.percent, clip),
        *(units.brief, units.gib, units.signed, units.amount, units.rate, beyond, unjudged),
    )
    made.filters.update({show.__name__: show for show in filters})
    return made


def scripts() -> list[str]:
    """What a page runs: Bokeh, and what draws the figures with it."""
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return [bokeh, environment().get_template("embed.js.jinja").render()]


def figures_json(figures: Mapping[str, Chart]) -> str:
    """One Bokeh document of all plots, which may share ranges and data, and which of them goes to which place."""
    document = Document()
    places = {}
    for name, chart in figures.items():
        for place, plot in ((name, chart.plot), (f"{name}-log", chart.log_plot)):
            if plot is not None:
                document.add_root(plot)
                places[plot.id] = place
    return serialize_json({"document": document.to_json(deferred=False), "places": places})


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """`text`, or its beginning and how much is not shown."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def json_markup(text: str) -> Markup:
    """JSON that cannot end the script element around it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  no markup is left in it


def csp_hash(script: str) -> str:
    """How a content security policy names an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
