"""The language of texts that people read: English, in which the code has them, or Chinese.

`locale/zh.po` has the Chinese of each English text. Texts are English unless they are made within
`speaking`. What programs read (JSON, sealed files, logs of stages) is made outside it. By
convention, `_` translates a text, and `N_` marks one that is translated where it is shown.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from gettext import NullTranslations
from pathlib import Path
from typing import Literal

Language = Literal["en", "zh"]

CATALOGUE = Path(__file__).parent / "locale" / "zh.po"
_VARIABLE = "QWEN3_LANG"
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"(?:\n|$))+)', re.MULTILINE)
_LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides


class _Chinese(NullTranslations):
    """The texts of CATALOGUE; one that it lacks stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._texts = read_catalogue(CATALOGUE.read_text(encoding="utf-8"))

    def gettext(self, message: str) -> str:
        return self._texts.get(message, message)


_translations: ContextVar[NullTranslations] = ContextVar("_translations")


def language_of(environ: Mapping[str, str]) -> Language:
    """Return the language that a terminal wants: QWEN3_LANG's, else that of the locale."""
    chosen = environ.get(_VARIABLE)
    if chosen:
        return "zh" if chosen.startswith("zh") else "en"
    for name in _LOCALE_VARIABLES:
        if environ.get(name):
            return "zh" if environ[name].startswith("zh_CN") else "en"
    return "en"


@contextmanager
def speaking(language: Language) -> Iterator[None]:
    """Translate into `language` what this context and its callees translate."""
    token = _translations.set(_translations_to(language))
    try:
        yield
    finally:
        _translations.reset(token)


def _(message: str) -> str:
    """Return `message` in the language that is spoken; `.format` then fills its placeholders."""
    spoken = _translations.get(None)
    return message if spoken is None else spoken.gettext(message)


def N_(message: str) -> str:  # noqa: N802 - gettext's name for it
    """Return `message`, which is marked for the catalogue; `_` translates it where it is shown."""
    return message


def read_catalogue(text: str) -> dict[str, str]:
    """Return the translation of each text of a .po file, without its header.

    A text is a quoted string, or several below one another that are joined. What this project does
    not use (contexts, plural forms) is not read.
    """
    texts = {}
    for message, translation in _ENTRY.findall(text):
        texts[_joined(message)] = _joined(translation)
    texts.pop("", None)
    return texts


def _joined(quoted: str) -> str:
    """Return the string that quoted strings below one another make, in C's syntax."""
    return str(ast.literal_eval(f"({quoted})"))


@cache
def _translations_to(language: Language) -> NullTranslations:
    return _Chinese() if language == "zh" else NullTranslations()
