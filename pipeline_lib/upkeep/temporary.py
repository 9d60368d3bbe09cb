"""Removal of temporary sealed directories: those of a rehearsal, or of a training up to a rung."""

from collections.abc import Iterable
from contextlib import suppress

from pipeline_lib.core.errors import Interrupted
from pipeline_lib.core.files import read_json, remove_dir
from pipeline_lib.core.lock import locked
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.upkeep.inventory import run_name


def remove_passing(specs: Iterable[Spec], store: Store) -> int:
    """Remove the sealed directories and pointers of `specs`, and return the bytes freed.

    Checkpoints stay. Directories that an experiment of the store uses stay, since another config
    may need the same few steps. So do directories that another process has locked; that process
    will remove them.
    """
    there = []
    for spec in specs:
        if store.sealed(spec.ref).exists() or store.pointer(spec.ref).exists():
            there.append(spec)
    if not there:
        return 0
    used: set[str] = set()
    for frozen in (store.root / "experiments").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            used |= set(read_json(frozen)["parts"].values())
    freed = 0
    for spec in there:
        if spec.digest in used:
            continue
        sealed = store.sealed(spec.ref)
        lock = store.lock_path(run_name(spec))
        with suppress(Interrupted), locked(lock, _refuse):
            store.pointer(spec.ref).unlink(missing_ok=True)
            freed += sum(path.stat().st_size for path in sealed.rglob("*") if path.is_file())
            remove_dir(sealed)
    return freed


def _refuse(why: str) -> None:
    """Raise Interrupted instead of waiting for a lock."""
    raise Interrupted(why)
