"""Which parameters `train.freeze` means."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from pipeline_lib.base.errors import DataError


def frozen_names(names: Mapping[str, Iterable[str]], globs: Iterable[str]) -> set[str]:
    """The keys of `names` that one of `globs` matches; the values are what each is called, a tied one by two names.

    Raises DataError for a glob that matches nothing, and if nothing is left to train.
    """
    frozen: set[str] = set()
    for glob in globs:
        matched = {name for name, called in names.items() if any(fnmatchcase(each, glob) for each in called)}
        if not matched:
            near = get_close_matches(glob, names, n=3, cutoff=0.3) or list(names)[:3]
            raise DataError(f"train.freeze: {glob!r} matches no parameter of this model; near it: {', '.join(near)}")
        frozen |= matched
    if frozen and len(frozen) == len(names):
        raise DataError("train.freeze: matches every parameter of this model, so nothing is trained; leave some out")
    return frozen
