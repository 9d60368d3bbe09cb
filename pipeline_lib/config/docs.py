"""Make docs/config.md and the editors' JSON schema from the config schema: none is out of date."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline_lib.config.effects import EFFECTS, Effect
from pipeline_lib.config.schema import ConfigFile
from pipeline_lib.core.language import N_, _

_INTRODUCTION = N_(
    """\
# Every key of a config file

English | [简体中文](config.zh-CN.md)

This page lists the keys of a config file with their allowed values, defaults and meaning. Any other key is an error.

- The default "none" means that the key is not set.
- Paths are relative to the folder where you run `qwen3 run`.
- `qwen3 check my.yaml` checks a config file and names every mistake with its line.

`make docs` generates this page from the sections in `pipeline_lib/config`.
"""
)
_CHANGES = N_(
    """\
## What a key changes

The first column says which stages compute again with another value, because their digests change. For the training that
includes the plan. The second says whether the model or the report differ then: "up to rounding" means that sums are
made in another order or by another kernel, and "by content" that the content of the files decides, not their place.

- A finished training is not repeated for a key that changes only the plan, and an unfinished one continues.
- With `train.local_sgd_steps` or `gradient_compression: powersgd` each rank approximates by itself. The number of ranks
  and `train.micro_batch_blocks` then change the result, and belong to the digest of the training.
- The limits of what `tokenize` may leave out are in no digest. A sealed result that has lost more is refused.
- The text of `train.deepspeed_json` belongs to the plan; its path does not.

| computes again | another result | keys |
|---|---|---|"""
)
_HEADER = N_("| key | value | default | meaning |\n|---|---|---|---|")
_TYPES = {
    "integer": N_("whole number"),
    "number": N_("number"),
    "string": N_("text"),
    "boolean": N_("`true` or `false`"),
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}

Node = Mapping[str, Any]


def config_json_schema() -> str:
    """Return the JSON schema (draft 2020-12) of config files, for editors that check YAML.

    They complete keys with it too.
    """
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    schema |= ConfigFile.model_json_schema()
    of_one = schema.pop("required")
    schema["anyOf"] = [{"required": of_one}, {"required": ["experiments"]}]
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def config_page() -> str:
    """Return docs/config.md: all keys in Markdown, with a table per section in schema order.

    Each section has a heading. The page is in the language that is spoken.
    """
    schema = ConfigFile.model_json_schema()
    definitions = schema["$defs"]
    parts = [_(_INTRODUCTION).strip()]
    sections = dict(_sections("", schema, definitions))  # several models have the section `rope`
    for title, section in sections.items():
        rows = _rows(section, definitions)
        if rows:
            lines = [f"## {title}", "", _(section["description"]), "", _(_HEADER), *rows]
            parts.append("\n".join(lines))
    parts.append(_effects())
    return "\n\n".join(parts) + "\n"


def _rows(section: Node, definitions: Node) -> list[str]:
    """Return the lines of a section's table, `source` first."""
    rows = []
    properties = section["properties"]
    for key in sorted(properties, key=lambda key: key != "source"):
        node = properties[key]
        # A section that may be left out has a row too.
        is_optional = "anyOf" in node or _is_optional_list(node)
        if is_optional or not _members(node, definitions):
            description = _(node["description"]).replace("|", "\\|")
            rows.append(f"| `{key}` | {_value(node)} | {_default(node)} | {description} |")
    return rows


def _effects() -> str:
    """Return the table of what keys change: those with the same effect in one row."""
    keys_of: dict[Effect, list[str]] = {}
    for key, effect in EFFECTS.items():
        keys_of.setdefault(effect, []).append(f"`{key}`")
    lines = [_(_CHANGES)]
    for effect, keys in keys_of.items():
        lines.append(f"| {effect.anew} | {_(effect.result)} | {', '.join(keys)} |")
    return "\n".join(lines)


def _sections(name: str, section: Node, definitions: Node) -> Iterator[tuple[str, Node]]:
    """Yield every section with its title, the outer before the inner."""
    yield (f"`{name}`" if name else _("Top level")), section
    for key, node in section["properties"].items():
        members = _members(node, definitions)
        if _is_optional_list(node) and len(members) > 1:
            continue  # of the kinds that a required list has
        path = f"{name}.{key}".lstrip(".")
        if node.get("type") == "array":
            path += "[]"
        for member in members:
            inner = _sections(path, member, definitions)
            if len(members) > 1:
                next(inner)  # the member itself, whose title says its source instead
                sources = _value(member["properties"]["source"]).replace("`, `", _("` or `"))
                yield _("`{path}` with source {sources}").format(path=path, sources=sources), member
            yield from inner


def _is_optional_list(node: Node) -> bool:
    """Return whether `node` is an optional list."""
    return node.get("type") == "array" and "default" in node


def _members(node: Node, definitions: Node) -> list[Node]:
    """Return the sections that `node` may hold; none if it is a plain value."""
    return [
        definitions[choice["$ref"].rpartition("/")[2]]
        for choice in _choices(node.get("items", node))
        if "$ref" in choice
    ]


def _choices(node: Node) -> list[Node]:
    """Return what `node` may be one of, also where one of those is one of several."""
    found = node.get("oneOf") or node.get("anyOf")
    if found is None:
        return [node]
    return [inner for choice in found for inner in _choices(choice)]


def _value(node: Node) -> str:
    """Describe the values that `node` allows, in words."""
    if "$ref" in node:
        return _("a section, see its table")
    if "discriminator" in node:
        return _("sections")
    if "anyOf" in node or "oneOf" in node:
        return _(" or ").join(
            _value(choice) for choice in _choices(node) if choice.get("type") != "null"
        )
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    if "type" not in node:
        return _("any value")
    if node["type"] == "object":
        values = node.get("additionalProperties")
        if not isinstance(values, dict):
            return _("object")
        return _("names to {values}").format(values=_value(values))
    if node["type"] == "array":
        return _("list of {items}").format(items=_value(node["items"]))
    if node.get("minimum", node) == node.get("maximum"):
        return f"`{node['minimum']}`"
    bounds = []
    for key, sign in _BOUNDS.items():
        if key in node:
            limit = node[key]
            bounds.append(f"{sign} {limit:,}" if isinstance(limit, int) else f"{sign} {limit:g}")
    return f"{_(_TYPES[node['type']])} {', '.join(bounds)}".strip()


def _default(node: Node) -> str:
    if "default" not in node:
        return _("required")
    default = node["default"]
    if default is None:
        return _("none")
    return f"`{default}`" if isinstance(default, str) else f"`{json.dumps(default)}`"
