"""Sealed directories that are of use for a moment only: of a rehearsal, or of a training up to a rung."""

from collections.abc import Iterable
from pathlib import Path

from pipeline_lib.base.errors import Interrupted
from pipeline_lib.base.fsio import read_json, remove_dir
from pipeline_lib.base.lock import locked
from pipeline_lib.base.spec import Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import run_digest


def remove_passing(specs: Iterable[Spec], store: Store) -> int:
    """Remove the sealed directories and pointers of `specs`; how many bytes that freed. Checkpoints stay.

    What an experiment of the store is made of is kept: another config may ask for the same few steps. So is what
    somebody works on now, who will remove it.
    """
    used: set[str] | None = None
    freed = 0
    for spec in specs:
        if not store.sealed(spec.ref).exists() and not store.pointer(spec.ref).exists():
            continue
        if used is None:
            used = {digest for path in (store.root / "experiments").glob("*.json") for digest in _parts(path)}
        if spec.digest not in used:
            freed += _remove(spec, store)
    return freed


def _remove(spec: Spec, store: Store) -> int:
    sealed = store.sealed(spec.ref)
    try:
        with locked(store.lock_path(run_digest(spec) if spec.stage == "train" else spec.digest), _refuse):
            store.pointer(spec.ref).unlink(missing_ok=True)
            freed = sum(path.stat().st_size for path in sealed.rglob("*") if path.is_file())
            remove_dir(sealed)
            return freed
    except Interrupted:
        return 0


def _refuse(why: str) -> None:
    """Instead of waiting for who holds a lock."""
    raise Interrupted(why)


def _parts(frozen: Path) -> set[str]:
    try:
        return set(read_json(frozen)["parts"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
