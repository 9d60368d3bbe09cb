"""The imported config as YAML, with comments on what differs from the files it came from."""

import textwrap
from collections.abc import Sequence
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from pipeline_lib.config.import_draft import DEFAULTS, OFF, AccountPart, Draft, Row
from pipeline_lib.config.schema import Config

COMMENT_CHARS = 100


def yaml_text(draft: Draft, head: str) -> str:
    """Return `draft`'s values as a config file in schema order, with comments, after `head`."""
    root = CommentedMap()
    ordered = sorted(draft.values, key=list(DEFAULTS).index)
    for section in Config.model_fields:
        inner = [ours for ours in ordered if ours.startswith(f"{section}.")]
        if section in draft.values:
            root[section] = _flow(draft.values[section])
        elif inner:
            root[section] = CommentedMap()
            _fill(root[section], section, inner, draft)
        if comment := draft.comments.get(section):
            root.yaml_set_comment_before_after_key(section, before=_wrapped(comment))
    text = StringIO()
    writer = YAML()
    writer.width = 4096
    writer.indent(mapping=2, sequence=4, offset=2)
    writer.dump(root, text)
    lines = [f"# {line}" for line in _wrapped(head).splitlines()]
    lines += _without_a_key(draft)
    return "\n".join([*lines, text.getvalue()])


def _fill(section: CommentedMap, name: str, inner: Sequence[str], draft: Draft) -> None:
    """Put the values of the keys `inner` into section `name`; `train.lora.rank` into `lora` there."""
    for ours in inner:
        above, _, last = ours.removeprefix(f"{name}.").rpartition(".")
        place = section
        indent = 2
        if above:
            place = section.setdefault(above, CommentedMap())
            indent = 4
        place[last] = _flow(draft.values[ours])
        if comment := draft.comments.get(ours):
            place.yaml_set_comment_before_after_key(last, before=_wrapped(comment), indent=indent)


def _flow(value: Any) -> Any:
    """Return `value` for the YAML writer: object lists item by item, all else on one line."""
    if isinstance(value, dict):
        made = CommentedMap({key: _flow(item) for key, item in value.items()})
        made.fa.set_flow_style()
        return made
    if isinstance(value, list | tuple):
        items = CommentedSeq(_flow(item) for item in value)
        if not any(isinstance(item, dict) for item in value):
            items.fa.set_flow_style()
        return items
    return value


def _wrapped(text: str) -> str:
    lines = textwrap.wrap(text, COMMENT_CHARS, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def _without_a_key(draft: Draft) -> list[str]:
    """Return comments for what is not written at a key: changes, and what has no equivalent.

    The changes are those without a comment of their own.
    """
    changed = [row for row in draft.rows if row.part == AccountPart.CHANGED and not row.here]
    not_converted = [row for row in draft.rows if row.part == AccountPart.NONE and row.why != OFF]
    return _list("Changed, and no key says it", changed) + _list("Not converted", not_converted)


def _list(title: str, rows: Sequence[Row]) -> list[str]:
    """Return the rows as a list in comments; nothing for none."""
    if not rows:
        return []
    lines = [f"# {title}:"]
    for row in rows:
        bullet = "-"
        for line in _wrapped(f"{row.there}: {row.why}").splitlines():
            lines.append(f"#   {bullet} {line}")
            bullet = " "
    return lines
