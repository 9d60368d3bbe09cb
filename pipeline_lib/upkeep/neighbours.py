"""Stores that lie side by side: each has directories of its own, and all have their runs and locks in one place."""

from pathlib import Path

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest
from pipeline_lib.upkeep.inventory import SPECS, each, specs_in


def runs_beside(store: Store) -> frozenset[str]:
    """The names that run folders of the other stores beside `store` have; the same training has the same in each."""
    beside = [Store(folder) for folder in store.root.parent.iterdir() if _is_another(folder, store.root)]
    return frozenset(each(_run_name, [one.spec_path(digest) for one in beside for digest in specs_in(one)]))


def _is_another(folder: Path, root: Path) -> bool:
    """Whether `folder` is a store, and not the one at `root` by another name."""
    try:
        return folder.joinpath(SPECS).is_dir() and not folder.samefile(root)
    except OSError:  # not ours to read
        return False


def _run_name(path: Path) -> str:
    try:
        spec = Store(path.parent.parent).read_spec(path)
    except (IntegrityError, RecursionError):
        return path.stem
    return run_digest(spec) if spec.stage == "train" else spec.digest
