"""Read YAML without its traps: 1e-4 is a number, `no` a word, 010 ten, a repeated key an error.

ruamel.yaml (YAML 1.2) parses the syntax. The values are built here: text, numbers, true, false,
null, lists and mappings with text keys, nothing else. Anchors are refused: a few lines of them can
expand to gigabytes.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ruamel.yaml import YAML, tokens
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from pipeline_lib.core.errors import ConfigError

Keys = tuple[str | int, ...]
Place = TypeVar("Place")
MAX_BYTES = 1 << 18
MAX_DEPTH = 20

_ANCHORS = (
    "anchors and aliases (& and *) are not read; write the value out; a text that begins with * "
    "or & has to stand in quotes, as in '*.jsonl'"
)
_REFUSED = {
    tokens.AliasToken: _ANCHORS,
    tokens.AnchorToken: _ANCHORS,
    tokens.TagToken: "tags (!) are not read; the key decides what type its value has",
    tokens.DirectiveToken: "directives (%) are not read; YAML 1.2 it is",
}
_OPENING = (
    tokens.BlockMappingStartToken,
    tokens.BlockSequenceStartToken,
    tokens.FlowMappingStartToken,
    tokens.FlowSequenceStartToken,
)
_CLOSING = (tokens.BlockEndToken, tokens.FlowMappingEndToken, tokens.FlowSequenceEndToken)


class _Int(int):
    text: str


class _Float(float):
    text: str


def as_written(value: Any) -> Any:
    """Return `value`, or the text of a number from a YAML file as it was written, such as `007`."""
    return value.text if isinstance(value, _Int | _Float) else value


@dataclass
class YamlDocument:
    """A parsed YAML file: plain value, the line (from 1) of each key and item, form problems."""

    value: Any = None
    lines: dict[Keys, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def load(path: Path) -> YamlDocument:
    """Read the YAML file at `path`.

    Raises ConfigError, naming file and line, if it is not YAML accepted here.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(str(path), [f"larger than {MAX_BYTES} bytes: not a config file"])
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error
    try:
        return parse(content.decode(), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(str(path), [f"line {line}: not UTF-8"]) from error


def parse(text: str, source: str) -> YamlDocument:
    """Parse `text`.

    Raises ConfigError, naming `source` and the line, if it is not YAML accepted here.
    """
    try:
        if problems := _refused(text):
            raise ConfigError(source, problems)
        root = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        raise ConfigError(source, [_not_yaml(error, text)]) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            source, [f"line {line}: not YAML: no text holds U+{error.character:04X}"]
        ) from error
    except YAMLError as error:
        raise ConfigError(source, [f"not YAML: {str(error).strip().splitlines()[0]}"]) from error
    document = YamlDocument()
    if root is not None:
        document.value = _plain(root, (), document)
    return document


# What the parser says of a line that is indented otherwise than those beside it.
_OF_INDENTATION = ("expected <block end>", "mapping values are not allowed")


def _not_yaml(error: MarkedYAMLError, text: str) -> str:
    """Return in words why `text` is not YAML; for the usual slips, what to look at."""
    if text.lstrip().startswith("{"):
        return "holds JSON lines, as a data file does; a config is YAML, such as config/config.yaml"
    where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
    problem = str(error.problem)
    if problem.startswith(_OF_INDENTATION):
        return (
            f"{where}not YAML: this line is indented otherwise than the keys beside it, or a text "
            "with `: ` in it is not in quotes"
        )
    begun = ""
    if error.context_mark:
        begun = f" ({error.context} from line {error.context_mark.line + 1})"
    return f"{where}not YAML: {problem}{begun}"


def dotted(keys: Keys) -> str:
    """Return a key's path as users write it, `data.train[0].path`, quoted where needed.

    A key that is not a word is quoted.
    """
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += f".{key}" if key.replace("_", "").replace("-", "").isalnum() else f".{key!r}"
    return text.lstrip(".")


def undotted(text: str) -> Keys:
    """Return the parts of a key written as `data.train[0].path`; empty if it has another form."""
    parts = text.replace("[", ".[").split(".")
    if not all(re.fullmatch(r"[\w-]+|\[\d{1,4}\]", part, re.ASCII) for part in parts):
        return ()
    return tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)


def at_nearest(places: Mapping[Keys, Place], keys: Keys) -> Place | None:
    """Return the place of `keys`, or of the nearest key above that has one; None if none has."""
    for end in range(len(keys), 0, -1):
        if keys[:end] in places:
            return places[keys[:end]]
    return None


def _refused(text: str) -> list[str]:
    """Return a problem for each construct in `text` that is YAML but is not accepted here."""
    problems: dict[str, None] = {}
    depth = 0
    for token in YAML(typ="safe", pure=True).scan(text):
        line = token.start_mark.line + 1
        depth += isinstance(token, _OPENING) - isinstance(token, _CLOSING)
        if depth > MAX_DEPTH:
            return [*problems, f"line {line}: nested more than {MAX_DEPTH} deep"]
        if remark := _REFUSED.get(type(token)):
            problems[f"line {line}: {remark}"] = None
    return list(problems)


def _plain(node: Any, where: Keys, document: YamlDocument) -> Any:
    if isinstance(node, ScalarNode):
        return _scalar(node, where, document)
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[(*where, index)] = item.start_mark.line + 1
        return [_plain(item, (*where, index), document) for index, item in enumerate(node.value)]
    plain: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode):
            document.problems.append(
                f"line {line}: {dotted(where) or 'the file'}: a key has to be a word"
            )
            continue
        keys = (*where, _text(key_node, where, document))
        if keys in document.lines:
            document.problems.append(
                f"line {line}: {dotted(keys)}: given twice, first in line {document.lines[keys]}"
            )
            continue
        document.lines[keys] = line
        plain[str(keys[-1])] = _plain(value_node, keys, document)
    return plain


def _scalar(
    node: ScalarNode, where: Keys, document: YamlDocument
) -> str | int | float | bool | None:
    """Return the value of `node`.

    A number that is too large stays text: the schema then refuses and shows it.
    """
    kind = str(node.tag).rpartition(":")[2]
    text = _text(node, where, document)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    digits = text.replace("_", "").lower()
    try:
        if kind == "int":
            base = {"0x": 16, "0o": 8, "0b": 2}.get(digits.lstrip("+-")[:2], 10)
            number: _Int | _Float = _Int(digits, base)
        elif kind == "float":
            number = _Float(digits)
        else:
            return text
    except ValueError:
        return text
    number.text = text
    is_too_large = abs(number) > sys.maxsize if kind == "int" else not math.isfinite(number)
    return text if is_too_large else number


def _text(node: ScalarNode, where: Keys, document: YamlDocument) -> str:
    """Return the text of `node`.

    A lone surrogate is a problem, and is escaped: no file or terminal accepts it.
    """
    text = str(node.value)
    try:
        text.encode()
    except UnicodeEncodeError:
        line = node.start_mark.line + 1
        document.problems.append(
            f"line {line}: {dotted(where) or 'the file'}: holds half of a surrogate pair"
        )
        return text.encode(errors="backslashreplace").decode()
    return text
