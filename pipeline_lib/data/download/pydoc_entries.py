"""What the running Python's documentation says about the public objects of its standard library.

The same for every run of the same Python: no memory addresses, no paths of its own, no order that depends on hashing.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Modules that import fast and without side effects, whatever the system and however Python was built.
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
class Entry:
    """A public object of the standard library, and what its documentation says."""

    name: str  # as one writes it after importing the module: json.dumps
    short: str  # its last part
    module: str
    kind: str  # module, class, function or method
    holder: str  # the module or class that it belongs to
    signature: str | None
    parameters: tuple[str, ...] | None
    summary: str | None
    members: tuple[str, ...]


def read_entries() -> Iterator[Entry]:
    """All public objects of `MODULES`: the modules, their functions and classes, the methods of those."""
    for module_name in MODULES:
        yield from _entries(module_name)


def _entries(module_name: str) -> Iterator[Entry]:
    module = importlib.import_module(module_name)
    public = [name for name in _public_names(module) if _kind(getattr(module, name)) is not None]
    yield _entry(module_name, module, module_name, "", "module", public)
    for name in public:
        value = getattr(module, name)
        kind = _kind(value)
        if kind == "class":
            methods = [key for key in sorted(vars(value)) if not key.startswith("_") and callable(vars(value)[key])]
            yield _entry(f"{module_name}.{name}", value, module_name, module_name, kind, methods)
            for method in methods:
                full_name, holder = f"{module_name}.{name}.{method}", f"{module_name}.{name}"
                yield _entry(full_name, vars(value)[method], module_name, holder, "method", [])
        elif kind is not None:
            yield _entry(f"{module_name}.{name}", value, module_name, module_name, kind, [])


def _entry(name: str, value: Any, module: str, holder: str, kind: str, members: list[str]) -> Entry:
    signature, parameters = _signature(value) if kind in ("function", "method") else (None, None)
    short = name.rpartition(".")[2]
    listed = tuple(members[:MAX_MEMBERS])
    return Entry(name, short, module, kind, holder, signature, parameters, _summary(value, short), listed)


def _public_names(module: ModuleType) -> list[str]:
    """What the module offers: its `__all__`, else what is defined in it."""
    if hasattr(module, "__all__"):
        return sorted(name for name in module.__all__ if name[0] != "_" and hasattr(module, name))
    own = vars(module).items()
    return sorted(name for name, value in own if name[0] != "_" and getattr(value, "__module__", "") == module.__name__)


def _kind(value: Any) -> str | None:
    if inspect.isclass(value):
        return "class"
    return "function" if inspect.isroutine(value) else None


def _signature(value: Any) -> tuple[str | None, tuple[str, ...] | None]:
    """The signature without annotations, and the names of the parameters; None where it is unknown or unwieldy."""
    try:
        signature = inspect.signature(value)
    except (ValueError, TypeError):
        return None, None
    empty = inspect.Parameter.empty
    bare = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    if len(text) > MAX_SIGNATURE_CHARS or re.search("[<{]", text):  # an address, or a set in no certain order
        return None, None
    if sys.prefix in text or sys.base_prefix in text:  # where this Python lies, as a default
        return None, None
    return text, tuple(name for name in signature.parameters if name not in ("self", "cls"))


def _summary(value: Any, short: str) -> str | None:
    """The first sentence of the object's own docstring, if it is one."""
    text = value.__doc__
    if not isinstance(text, str):
        return None
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", inspect.cleandoc(text)) if part.strip()]
    if paragraphs and paragraphs[0].startswith(f"{short}("):  # builtins begin with their signature
        paragraphs = paragraphs[1:]
    if not paragraphs:
        return None
    sentence = re.split(r"(?<=[.!?:])\s", paragraphs[0])[0].rstrip(":.") + "."
    fits = MIN_SUMMARY_CHARS <= len(sentence) <= MAX_SUMMARY_CHARS
    return sentence if fits and sentence.isascii() and " at 0x" not in sentence else None
