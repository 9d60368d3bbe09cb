"""Generates questions and answers about the standard library from that documentation.

The answers are short and follow from the question, so that a very small model visibly learns. The
rows are byte-identical in every run of the same Python.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import write_text
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.library_docs import DocumentedObject, read_entries

SYSTEM = "You know the standard library of Python. Answer briefly."
MAX_PARAMETERS = 4  # the most parameters of an object whose parameters are asked for


def write_rows(path: Path, max_rows: int) -> int:
    """Write at most `max_rows` conversations to `path`, one a line; return their number.

    Raises DataError if none.
    """
    rows = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations())
    chosen = list(islice(dict.fromkeys(rows), max_rows))
    if not chosen:
        raise DataError("this Python has no documentation (started with -OO?); run it without")
    write_text(path, "".join(row + "\n" for row in chosen))
    return len(chosen)


def conversations() -> Iterator[list[Message]]:
    """Yield all conversations, in an order that depends only on the version of Python.

    Objects come in pseudo-random order, each with all its questions. So the first thousand
    conversations cover every module, and held-out conversations can be answered from others about
    the same object.
    """
    entries = sorted(read_entries(), key=lambda entry: _hash_of(entry.name))
    holders = Counter(entry.short for entry in entries if entry.kind in ("class", "function"))
    for entry in entries:
        asked = list(_questions(entry, unique=holders[entry.short] == 1))
        first = _hash_of(entry.name)[1] % len(asked)
        for number, pair in enumerate(asked):
            if number == first:
                yield _conversation(asked[first : first + 2])  # two questions about the same object
            elif number != first + 1:
                yield _conversation([pair])


def _conversation(pairs: Iterable[tuple[str, str]]) -> list[Message]:
    messages = []
    for question, answer in pairs:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    if _hash_of(messages[0]["content"])[0] % 8 == 0:
        messages.insert(0, {"role": "system", "content": SYSTEM})
    return messages


def _questions(entry: DocumentedObject, unique: bool) -> Iterator[tuple[str, str]]:
    """Yield questions and answers on `entry`; ask for its module if its name is `unique`.

    The name is the short one.
    """
    name = entry.name
    code = f"`{entry.name}`"
    if entry.kind == "module":
        yield f"What kind of object is {code}?", f"{code} is a module."
    else:
        whole = "class" if entry.kind == "method" else "module"
        yield (
            f"What kind of object is {code}?",
            f"{code} is a {entry.kind} of the {whole} `{entry.holder}`.",
        )
    if unique and entry.kind in ("class", "function"):
        yield (
            f"Which module has the {entry.kind} `{entry.short}`?",
            f"`{entry.short}` is in the module `{entry.module}`.",
        )
        yield f"How do I import `{entry.short}`?", f"`from {entry.module} import {entry.short}`"
    if entry.summary:
        yield (
            f"What does {code} do?" if entry.kind != "module" else f"What is {code} for?",
            entry.summary,
        )
    if entry.signature is not None:
        yield f"What is the signature of {code}?", f"`{name}{entry.signature}`"
    if entry.parameters is not None and len(entry.parameters) <= MAX_PARAMETERS:
        names = [f"`{parameter}`" for parameter in entry.parameters]
        taken = _listed(names) if names else "none"
        yield f"Which parameters does {code} take?", f"`{entry.short}` takes {taken}."
    if entry.members:
        what = "methods" if entry.kind == "class" else "members"
        yield (
            f"Name some {what} of {code}.",
            _listed([f"`{name}.{member}`" for member in entry.members]) + ".",
        )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _hash_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
