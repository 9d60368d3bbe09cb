"""Runs one stage: a function from sealed directories to one sealed directory.

The harness does what every stage needs: it locks, verifies what is read, stages, seals and publishes, and
leaves everything as it was when the stage fails.
"""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.core import files
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.lock import Lock, locked
from pipeline_lib.core.store import (
    MANIFEST_NAME,
    NOTHING_VERIFIED,
    InputEntry,
    Manifest,
    Ref,
    Spec,
    Store,
    VerifiedFiles,
    describe_files,
    read_manifest,
    verify,
    verify_content,
    verify_sizes,
    write_manifest,
)

Say = Callable[[str], None]
RECORDED_PACKAGES = (
    *("numpy", "pyarrow", "tiktoken", "tokenizers", "jinja2"),
    *("torch", "transformers", "peft", "safetensors"),
)


@dataclass(frozen=True)
class Sealed:
    """A sealed directory that holds the files that were sealed, in their sizes.

    Their content is read only behind `file` or `folder`, which check it.
    """

    path: Path
    manifest: Manifest
    verified: VerifiedFiles = NOTHING_VERIFIED

    def file(self, name: str) -> Path:
        """Where the file `name` is, its content checked, or would be. Raises IntegrityError, Unreadable."""
        verify_content(self.path, self.manifest, self.manifest.files.keys() & {name}, self.verified)
        return self.path / name

    def folder(self, *patterns: str) -> Path:
        """The directory, the content checked of all files whose names fit one of `patterns`; without any, of all.

        Of the rest nothing may be read. `*` stands for any characters, `/` too. Raises IntegrityError, Unreadable.
        """
        names = (name for name in self.manifest.files if any(fnmatchcase(name, one) for one in patterns or ("*",)))
        verify_content(self.path, self.manifest, names, self.verified)
        return self.path


@dataclass(frozen=True)
class Job:
    """What a stage gets: its spec, its inputs, an empty directory to fill, a voice, and the lock it holds."""

    spec: Spec
    store: Store
    inputs: Mapping[str, Sealed]
    out: Path
    say: Say
    lock: Lock
    slurm_job: str = ""

    @cached_property
    def run_dir(self) -> Path:
        """Working state of this digest that outlives a failure."""
        path = self.store.run_dir(self.spec.digest)
        path.mkdir(parents=True, exist_ok=True)
        return path


StageFunction = Callable[[Job], dict[str, Any]]


def done_lines(ref: Ref) -> tuple[str, str]:
    """What the line of a log begins with that says that the stage of `ref` is done now, or was already.

    Written by `run_stage`, for programs that read it.
    """
    return f"{ref.stage} {ref.digest}: done", f"{ref.stage} {ref.digest}: already done"


def peak_rss_bytes() -> int:
    """Largest resident memory of this process or of any child that has ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024


def tool_versions() -> dict[str, str]:
    """Python, the packages that decide bytes, and the commit of this code where git knows it."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if described.returncode == 0:
        versions["code"] = described.stdout.strip()
    return versions


def machine() -> str:
    """`64 cores (Intel Xeon), 8 x NVIDIA H100, Linux x86_64`: what kind of machine this is, not which."""
    cpu = _first_value(Path("/proc/cpuinfo"), "model name") or "CPU"
    parts = [f"{os.cpu_count()} cores ({cpu})"]
    gpus = [_first_value(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    parts += [f"{gpus.count(kind)} x {kind or 'GPU'}" for kind in sorted(set(gpus))]
    return ", ".join([*parts, f"{platform.system()} {platform.machine()}"])


def _first_value(path: Path, key: str) -> str:
    """The first `key: value` of a file of the system; empty where there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (value for name, _, value in (line.partition(":") for line in lines) if name.strip() == key)
    return " ".join(next(found, "").split())


def open_inputs(spec: Spec, store: Store) -> dict[str, Sealed]:
    """Every directory that `spec` reads, as `open_sealed` opens it."""
    return {name: open_sealed(ref, store) for name, ref in spec.inputs.items()}


def open_sealed(ref: Ref, store: Store) -> Sealed:
    """The sealed directory of `ref`; the content of its files is still to be checked.

    Raises IntegrityError if it is another one's or files are missing, Unreadable.
    """
    path = store.sealed(ref)
    manifest = verify_sizes(path)
    if manifest.digest != ref.digest or manifest.stage != ref.stage:
        raise IntegrityError(f"{path}: sealed as {manifest.stage} {manifest.digest}; delete it and run snakemake again")
    return Sealed(path, manifest, store.verified)


def is_sealed(spec: Spec, store: Store) -> bool:
    """Whether the directory of `spec` is already complete. Raises IntegrityError if it is damaged, Unreadable."""
    if not store.is_sealed(spec.ref):
        return False
    open_sealed(spec.ref, store).folder()
    return True


def seal_and_publish(job: Job, counts: dict[str, Any], started_at: datetime, duration_s: float) -> None:
    """Seal `job.out` and rename it to its final name; if somebody was faster, verify theirs and keep it.

    Raises LockLost if the lock was lost, right before the rename.
    """
    final = job.store.sealed(job.spec.ref)
    manifest = Manifest(
        stage=job.spec.stage,
        digest=job.spec.digest,
        spec={**job.spec.to_json(), "where": {}},  # a manifest travels, and such paths name people
        inputs={
            name: InputEntry(
                stage=sealed.manifest.stage,
                digest=sealed.manifest.digest,
                manifest_sha256=sha256_file(sealed.path / MANIFEST_NAME),
            )
            for name, sealed in job.inputs.items()
        },
        files=describe_files(job.out),
        counts=counts,
        versions=tool_versions(),
        machine=machine(),
        job=job.slurm_job,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=round(duration_s, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )
    write_manifest(job.out, manifest)
    if not files.publish_dir(job.out, final, job.lock.require):
        verify(final, job.store.verified)
        shutil.rmtree(job.out, ignore_errors=True)


def run_stage(
    function: StageFunction,
    spec: Spec,
    store: Store,
    say: Say,
    lock_digest: str | None = None,
    lock_note: Mapping[str, Any] | None = None,
) -> Manifest:
    """Bring the sealed directory of `spec` into being with `function`, and point Snakemake at it.

    A directory that is already sealed is verified and kept. `lock_digest` names the lock where several
    specs share one working directory, `lock_note` is what it tells of us; of a SLURM job, its number as `slurm_job`.
    """
    final = store.sealed(spec.ref)
    final.parent.mkdir(parents=True, exist_ok=True)
    lock_path = store.lock_path(lock_digest or spec.digest)
    with locked(lock_path, say, note=lock_note) as lock:
        files.sweep(final.parent, final.name)
        if is_sealed(spec, store):
            say(f"{done_lines(spec.ref)[1]}, verified")
        else:
            files.remove_dir(final)  # there but not sealed: Snakemake and file managers make empty parents
            _make(function, spec, store, say, lock, str((lock_note or {}).get("slurm_job", "")))
        store.write_pointer(spec.ref)
    return read_manifest(final)


def _make(function: StageFunction, spec: Spec, store: Store, say: Say, lock: Lock, slurm_job: str) -> None:
    started_at, start_s = datetime.now(UTC), time.monotonic()
    inputs = open_inputs(spec, store)
    final = store.sealed(spec.ref)
    with files.disk_full_named(final):
        job = Job(spec, store, inputs, files.stage_dir(final), say, lock, slurm_job)
        try:
            counts = function(job)
            duration_s = time.monotonic() - start_s
            seal_and_publish(job, counts, started_at, duration_s)
        finally:
            shutil.rmtree(job.out, ignore_errors=True)
    say(f"{done_lines(spec.ref)[0]} in {duration_s:.1f} s")


def say(text: str) -> None:
    """Print one line for the person who watches. When nobody does any more, the work goes on in silence."""
    try:
        print(text, file=sys.stdout, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
