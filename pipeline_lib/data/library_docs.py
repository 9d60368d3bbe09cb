"""Reads the documentation of the public objects of the running Python's standard library.

It is equal in every run of the same Python: no memory addresses, no installation paths, no
hash-dependent order.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Modules that import fast and without side effects on every system and in every build of Python.
# fmt: off
MODULES = (
    "abc", "argparse", "array", "ast", "asyncio", "base64", "bdb", "bisect", "calendar", "cmath", "cmd", "code",
    "codecs", "collections", "collections.abc", "colorsys", "concurrent.futures", "configparser", "contextlib", "copy",
    "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "email.message", "enum", "filecmp", "fileinput",
    "fnmatch", "fractions", "ftplib", "functools", "getopt", "gettext", "glob", "graphlib", "gzip", "hashlib", "heapq",
    "hmac", "html", "html.parser", "http.client", "http.cookies", "inspect", "io", "ipaddress", "itertools", "json",
    "keyword", "linecache", "locale", "logging", "logging.handlers", "mailbox", "math", "mimetypes", "numbers",
    "operator", "optparse", "os", "os.path", "pathlib", "pickle", "pkgutil", "platform", "plistlib", "pprint", "queue",
    "random", "re", "reprlib", "sched", "secrets", "selectors", "shelve", "shlex", "shutil", "signal", "smtplib",
    "socket", "socketserver", "stat", "statistics", "string", "struct", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "time", "timeit", "token", "tokenize", "traceback", "types", "typing", "unittest", "unittest.mock",
    "urllib.parse", "urllib.request", "uuid", "warnings", "wave", "weakref", "xml.dom.minidom", "xml.etree.ElementTree",
    "zipfile", "zlib",
)
# fmt: on

MAX_SIGNATURE_CHARS = 90
MAX_SUMMARY_CHARS = 140
MIN_SUMMARY_CHARS = 12
MAX_MEMBERS = 4


@dataclass(frozen=True)
class DocumentedObject:
    """A public object of the standard library with its documentation."""

    name: str  # qualified name, such as json.dumps
    short: str  # last part of the name
    module: str
    kind: str  # module, class, function or method
    holder: str  # the module or class that it belongs to
    signature: str | None
    parameters: tuple[str, ...] | None
    summary: str | None
    members: tuple[str, ...]


def read_entries() -> Iterator[DocumentedObject]:
    """Yield all public objects of `MODULES`: modules, functions, classes, and their methods."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = _public_names(module)
        public = [
            n
            for n in names
            if inspect.isclass(getattr(module, n)) or inspect.isroutine(getattr(module, n))
        ]
        yield _entry(module_name, module, module_name, "", "module", public)
        for name in public:
            value = getattr(module, name)
            full_name = f"{module_name}.{name}"
            if inspect.isclass(value):
                methods = [
                    key
                    for key in sorted(vars(value))
                    if not key.startswith("_") and callable(vars(value)[key])
                ]
                yield _entry(full_name, value, module_name, module_name, "class", methods)
                for method in methods:
                    yield _entry(
                        f"{full_name}.{method}",
                        vars(value)[method],
                        module_name,
                        full_name,
                        "method",
                        [],
                    )
            else:
                yield _entry(full_name, value, module_name, module_name, "function", [])


def _entry(
    name: str, value: Any, module: str, holder: str, kind: str, members: list[str]
) -> DocumentedObject:
    signature, parameters = _signature(value) if kind in ("function", "method") else (None, None)
    short = name.rpartition(".")[2]
    listed = tuple(members[:MAX_MEMBERS])
    return DocumentedObject(
        name, short, module, kind, holder, signature, parameters, _summary(value, short), listed
    )


def _public_names(module: ModuleType) -> list[str]:
    """Return the public names of `module`: its `__all__`, else the public names defined in it."""
    if hasattr(module, "__all__"):
        return sorted(name for name in module.__all__ if name[0] != "_" and hasattr(module, name))
    own = vars(module).items()
    return sorted(
        name
        for name, value in own
        if name[0] != "_" and getattr(value, "__module__", "") == module.__name__
    )


def _signature(value: Any) -> tuple[str | None, tuple[str, ...] | None]:
    """Return the signature without annotations, and its parameters; None if unsuitable.

    It is None too if the signature is unknown.
    """
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return None, None
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    # an address, or a set without a fixed order
    if len(text) > MAX_SIGNATURE_CHARS or re.search("[<{]", text):
        return None, None
    if sys.prefix in text or sys.base_prefix in text:  # the installation path in a default value
        return None, None
    return text, tuple(name for name in signature.parameters if name not in ("self", "cls"))


def _summary(value: Any, short: str) -> str | None:
    """Return the first sentence of the object's own docstring; None if missing or unsuitable."""
    text = value.__doc__
    if not isinstance(text, str):
        return None
    paragraphs = [
        " ".join(part.split())
        for part in re.split(r"\n\s*\n", inspect.cleandoc(text))
        if part.strip()
    ]
    if paragraphs and paragraphs[0].startswith(f"{short}("):  # builtins begin with their signature
        paragraphs = paragraphs[1:]
    if not paragraphs:
        return None
    sentence = re.split(r"(?<=[.!?:])\s", paragraphs[0])[0].rstrip(":.") + "."
    fits = MIN_SUMMARY_CHARS <= len(sentence) <= MAX_SUMMARY_CHARS
    return sentence if fits and sentence.isascii() and " at 0x" not in sentence else None
