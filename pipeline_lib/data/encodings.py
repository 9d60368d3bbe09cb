"""Guesses the encoding of text that is not UTF-8, so that an error can say how to convert it."""

import codecs
import re
from contextlib import suppress

_HIGH = re.compile(rb"[\x80-\xff]+")
_UTF_16 = {
    "UTF-16": re.compile(re.escape(codecs.BOM_UTF16_LE) + b"|" + re.escape(codecs.BOM_UTF16_BE)),
    "UTF-16LE": re.compile(rb"(?:[\t\n\r -~]\0){2}"),
    "UTF-16BE": re.compile(rb"(?:\0[\t\n\r -~]){2}"),
}


def utf_16_name(beginning: bytes) -> str | None:
    """Return a file's UTF-16 variant from its first 4 bytes (mark or zero bytes), or None."""
    return next((name for name, pattern in _UTF_16.items() if pattern.match(beginning)), None)


def guess(text: bytes) -> str:
    """Return the probable encoding of the non-UTF-8 `text`, and the command that converts it."""
    if (zero := text.find(b"\0")) >= 0:  # one of the two bytes of each character that ASCII has
        return (
            f"the file is probably UTF-16: iconv -f {'UTF-16LE' if zero % 2 else 'UTF-16BE'} -t "
            "UTF-8"
        )
    # In GBK text nearly all characters are two bytes above 127; in Western text two such bytes
    # rarely touch.
    runs = _HIGH.findall(text)
    if 2 * sum(len(run) for run in runs if len(run) > 1) > sum(map(len, runs)):
        # `text` may be cut at its end, which the incremental decoder accepts
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder("gb18030")().decode(text)
            return "the file is probably GBK: iconv -f GB18030 -t UTF-8"
    return "the file is probably Windows-1252 or Latin-1: iconv -f CP1252 -t UTF-8"
