"""Guesses what text that is not UTF-8 is instead, so that an error can say how to convert it."""

import codecs
import re

_HIGH = re.compile(rb"[\x80-\xff]+")
_UTF_16 = {
    "UTF-16": re.compile(re.escape(codecs.BOM_UTF16_LE) + b"|" + re.escape(codecs.BOM_UTF16_BE)),
    "UTF-16LE": re.compile(rb"(?:[\t\n\r -~]\0){2}"),
    "UTF-16BE": re.compile(rb"(?:\0[\t\n\r -~]){2}"),
}


def utf_16_name(beginning: bytes) -> str | None:
    """Which UTF-16 a file is that begins with these 4 bytes: by its byte order mark, or by zeros; None if it is not."""
    return next((name for name, pattern in _UTF_16.items() if pattern.match(beginning)), None)


def guess(text: bytes) -> str:
    """What `text`, which is not UTF-8, probably is, and how to convert its file."""
    if (zero := text.find(b"\0")) >= 0:  # one of the two bytes of each character that ASCII has
        return f"the file is probably UTF-16: iconv -f {'UTF-16LE' if zero % 2 else 'UTF-16BE'} -t UTF-8"
    # In Chinese text nearly all characters are two bytes above 127; in Western text hardly two stand together.
    runs = _HIGH.findall(text)
    if 2 * sum(len(run) for run in runs if len(run) > 1) > sum(map(len, runs)) and _is_gb18030(text):
        return "the file is probably GBK: iconv -f GB18030 -t UTF-8"
    return "the file is probably Windows-1252 or Latin-1: iconv -f CP1252 -t UTF-8"


def _is_gb18030(text: bytes) -> bool:
    """Whether `text`, whose end may be cut, can be GB 18030, which holds GBK and GB 2312."""
    try:
        codecs.getincrementaldecoder("gb18030")().decode(text)
    except UnicodeDecodeError:
        return False
    return True
