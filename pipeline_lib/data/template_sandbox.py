"""The jinja2 sandbox for chat templates: transformers' dialect, no access to Python or files.

It provides the same names as `transformers.utils.chat_template_utils`; a test compares the two.
"""

import json
from collections.abc import Callable, Mapping
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_DICT_ATTRIBUTES = frozenset(dir(dict))
# `format` and `format_map` are left out, because format strings can access attributes of Python
# objects.
_HARMLESS: Mapping[type, frozenset[str]] = {
    str: frozenset({"split", "strip", "lstrip", "rstrip", "startswith", "endswith"}),
    LoopContext: frozenset({"first", "last", "index0", "index"}),
}


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment whose templates cannot access files or Python, nor modify inputs."""
    # The output is a prompt, not HTML: escaping it would change the tokens.
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701
        finalize=_only_data,
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _only_data(value: Any) -> Any:
    """Raise TemplateError for functions and other objects: their text has a varying address.

    The address differs between runs.
    """
    if value is None or isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined)):
        return value
    raise jinja2.TemplateError(f"it writes a {type(value).__name__}, which is not text")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox twice as fast at the most frequent operations; jinja2 checks all others."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _HARMLESS.get(kind, ()):
            return getattr(obj, attribute)
        if kind is _TemplateNamespace and type(value := getattr(obj, attribute, None)) in (
            bool,
            int,
        ):
            return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as in jinja2
        if type(__obj) is BuiltinMethodType and __obj.__name__ in _HARMLESS.get(
            type(__obj.__self__), ()
        ):
            for name in (
                "_loop_vars",
                "_block_vars",
            ):  # jinja2's own arguments, for functions that take its context
                kwargs.pop(name, None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


class _Generation(Extension):
    """An extension for `{% generation %}...{% endgeneration %}`, around the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_unmarked"), [], [], body).set_lineno(line)

    def _unmarked(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """The `dict` of templates: a callable with `fromkeys`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """The `namespace` of templates, which refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805 - as in jinja2, so that namespace(self=...) works
        self = args[0]
        rest = args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        Namespace.__setitem__(self, name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a template may not store the private attribute {name!r}"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> NoReturn:
    raise jinja2.TemplateError(
        f"it writes today's date (strftime_now({pattern!r:.40})), so that the same data would give "
        "other samples tomorrow; put a fixed date into the template"
    )
