"""Verifies a store: every sealed byte against its hash, and every reference to it.

Each problem is reported with its remedy, and hides no other. What vanishes during the check counts
as removed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.core.files import is_there, sha256_file, unreadable_named
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, Spec, Store, is_hash, verify
from pipeline_lib.status.at_rest import shown
from pipeline_lib.status.catalog import LAST_PART, missing_products, unreadable
from pipeline_lib.upkeep.inventory import (
    SEALED,
    UNFINISHED,
    Inventory,
    Made,
    chosen,
    each,
    folders_in,
    specs_in,
)

AT_ONCE = 4  # directories; each hashes several files at a time


@dataclass(frozen=True)
class SealedDirectory:
    """A sealed directory to verify: one of a stage, or a checkpoint, with its bytes."""

    path: Path
    bytes: int
    made: Made | None = None


def to_verify(inventory: Inventory, digests: set[str] | None) -> list[SealedDirectory]:
    """Return the sealed directories and the checkpoints in runs/, or those of `digests`.

    `digests` are of instances and runs.
    """
    made, runs = chosen(inventory, digests)
    found = [SealedDirectory(one.path, one.bytes, one) for one in made if one.state == SEALED]
    for run in runs:
        for path in run.checkpoints:
            found.append(SealedDirectory(path, run.checkpoint_bytes // len(run.checkpoints)))
    return found


def verify_all(
    found: Sequence[SealedDirectory], store: Store, done: Callable[[SealedDirectory], None]
) -> list[str]:
    """Verify `found`; return the problems, one line each.

    Calls `done` with each directory once it is verified.
    """
    problems: dict[Path, list[str]] = {}
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        begun = {pool.submit(_problems, one, store): one for one in found}
        for future in as_completed(begun):
            problems[begun[future].path] = future.result()
            done(begun[future])
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits only for those that have begun
    return [line for one in found for line in problems[one.path]]


def damaged(inventory: Inventory, digests: set[str] | None) -> list[str]:
    """Return the problems outside the content of files: manifests, pointers, specs, experiments.

    With `digests` (of instances and runs) only theirs.
    """
    made, runs = chosen(inventory, digests)
    problems = [one.reason for one in made if one.reason]
    problems += [run.reason for run in runs if run.reason]
    if digests is None:
        for experiment in inventory.experiments:
            if not experiment.parts:
                problems.append(str(unreadable(experiment)))
        for path in inventory.foreign:
            problems.append(f"{path}: not made by any stage; move it elsewhere")
        problems += _pointers_alone(inventory)
    problems += _missing_products(inventory, digests)
    specs = [digest for digest in specs_in(inventory.store) if digests is None or digest in digests]
    of_specs = each(lambda digest: _spec_problem(inventory, digest), specs)
    problems += [problem for problem in of_specs if problem]
    return problems


def _pointers_alone(inventory: Inventory) -> Iterator[str]:
    """Yield a problem for each pointer whose directory is missing or unfinished."""
    for stage in folders_in(inventory.store.root):
        for pointer in sorted(stage.glob("[0-9a-f]*.ok")):
            of_pointer = inventory.by_digest.get(pointer.stem)
            if of_pointer is None or of_pointer.state == UNFINISHED:
                again = "run snakemake, which makes it again if it is needed"
                yield f"{pointer}: its directory is missing; {again}"


def _problems(one: SealedDirectory, store: Store) -> list[str]:
    try:
        with unreadable_named(one.path):
            manifest = verify(one.path)
            if one.made is None:
                return []
            return list(_wrong_references(one.made, manifest, store))
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        return []
    except IntegrityError as error:
        if not os.path.lexists(one.path / MANIFEST_NAME):  # removed meanwhile
            return []
        return [str(error)]
    except Unreadable as error:
        return [str(error)]


def _wrong_references(made: Made, manifest: Manifest, store: Store) -> Iterator[str]:
    manifest_path = made.path / MANIFEST_NAME
    spec = Spec.from_json(manifest.spec, str(manifest_path))
    if spec.digest != made.ref.digest:
        yield (
            f"{manifest_path}: its spec has digest {spec.digest}; delete {made.path} and run "
            "snakemake again"
        )
    pointer = store.pointer(made.ref)
    if is_there(pointer):
        named = pointer.read_bytes()
        if not is_hash(named):
            yield (
                f"{pointer}: contains no hash; run snakemake again with the same config, which "
                "rewrites it"
            )
        elif named.strip().decode() != sha256_file(manifest_path):
            yield (
                f"{pointer}: does not match the manifest in {made.path}; delete both and run "
                "snakemake again"
            )
    for entry in manifest.inputs.values():
        upstream = store.root / entry.stage / entry.digest
        try:
            if not is_there(upstream / MANIFEST_NAME):
                continue
            if sha256_file(upstream / MANIFEST_NAME) == entry.manifest_sha256:
                continue
            theirs = Manifest.model_validate_json((upstream / MANIFEST_NAME).read_bytes())
        except (OSError, ValueError):  # reported for that directory itself
            continue
        # otherwise it was deleted and made again: no damage
        if theirs.started_at < manifest.started_at:
            yield (
                f"{upstream / MANIFEST_NAME}: not the manifest that {made.path} was made from, "
                f"although it is older; delete {upstream} and run snakemake again"
            )


def _spec_problem(inventory: Inventory, digest: str) -> str | None:
    try:
        inventory.frozen_spec(digest)
    except IntegrityError as error:
        return str(error) if inventory.store.spec_path(digest).exists() else None
    return None


def _missing_products(inventory: Inventory, digests: set[str] | None) -> Iterator[str]:
    """Yield missing products of experiments with a report, unless a pointer reports them.

    A pointer that reports them already is enough.
    """
    for one in inventory.experiments:
        try:
            missing = missing_products(one, inventory.store)
        except Unreadable:  # reported for that directory itself
            continue
        if any(ref.stage == LAST_PART for ref in missing):
            continue
        for ref in missing:
            is_asked_for = digests is None or ref.digest in digests
            if is_asked_for and not inventory.store.pointer(ref).exists():
                yield (
                    f"{inventory.store.sealed(ref)}: missing for experiment {shown(one.name)}; "
                    "run snakemake again"
                )


@contextmanager
def progress_on(stream: TextIO, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes the number of newly verified bytes.

    The bar is shown only on a terminal.
    """
    shown = (
        TextColumn("verify"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(file=stream)
    with Progress(
        *shown, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("verify", total=total_bytes)
        yield lambda more: progress.advance(task, more)
