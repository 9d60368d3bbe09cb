"""YAML without its traps: 1e-4 is a number, `no` is a word, 010 is ten, a duplicate key is an error.

YAML 1.2 by ruamel.yaml; anchors are refused, since a few lines of them can expand to gigabytes.
"""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.tokens import AliasToken

from pipeline_lib.base.errors import ConfigError

Path_ = tuple[str | int, ...]
MAX_BYTES = 1 << 20


def load(path: Path) -> tuple[Any, dict[Path_, int]]:
    """The plain value in the YAML file at `path`, and the line (from 1) of each key in it.

    Raises ConfigError naming the file and the line.
    """
    text = _read(path)
    parser = YAML(typ="rt")
    try:
        if any(isinstance(token, AliasToken) for token in YAML(typ="rt").scan(text)):
            raise ConfigError(str(path), ["anchors and aliases are not read; write the value out"])
        document = parser.load(text)
    except DuplicateKeyError as error:
        raise ConfigError(str(path), [f"{_line_of(error)}{_first_line(error.problem)}"]) from error
    except MarkedYAMLError as error:
        raise ConfigError(str(path), [f"{_line_of(error)}not YAML: {_first_line(error.problem)}"]) from error
    except YAMLError as error:
        raise ConfigError(str(path), [f"not YAML: {_first_line(str(error))}"]) from error
    lines: dict[Path_, int] = {}
    return _plain(document, (), lines), lines


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(str(path), [f"larger than {MAX_BYTES} bytes: not a config file"])
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"not UTF-8 at byte {error.start}"]) from error
    except OSError as error:
        raise ConfigError(str(path), [f"cannot be read: {error.strerror}"]) from error


def _line_of(error: MarkedYAMLError) -> str:
    return f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""


def _first_line(text: str | None) -> str:
    return (text or "unknown problem").strip().splitlines()[0]


def _plain(node: Any, where: Path_, lines: dict[Path_, int]) -> Any:
    if isinstance(node, CommentedMap):
        for key in node:
            lines[(*where, key)] = node.lc.key(key)[0] + 1
        return {key: _plain(value, (*where, key), lines) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            lines[(*where, index)] = node.lc.item(index)[0] + 1
        return [_plain(value, (*where, index), lines) for index, value in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
