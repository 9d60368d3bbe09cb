"""The harness that runs one stage: a function from sealed directories to one sealed directory.

It locks the digest, verifies what is read, and stages, seals and publishes the output. A stage that
fails publishes nothing.
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
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.core import files
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.lock import Lock, locked
from pipeline_lib.core.spans import Spans
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
    "numpy",
    "pyarrow",
    "tiktoken",
    "tokenizers",
    "jinja2",
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "gguf",
    "llama-cpp-python",
)


@dataclass(frozen=True)
class Sealed:
    """A sealed directory whose files were checked for presence and size.

    Read their content only through `file` or `folder`, which verify it.
    """

    path: Path
    manifest: Manifest
    verified: VerifiedFiles = NOTHING_VERIFIED

    def file(self, name: str) -> Path:
        """Verify the content of the file `name` and return its path.

        A name that the manifest does not have is not checked. Raises IntegrityError, Unreadable.
        """
        verify_content(self.path, self.manifest, self.manifest.files.keys() & {name}, self.verified)
        return self.path / name

    def folder(self, *patterns: str) -> Path:
        """Verify the files whose names match `patterns`, or all without any; return the directory.

        Read no other file in it. `*` matches any characters, including `/`. Raises IntegrityError,
        Unreadable.
        """
        names = []
        for name in self.manifest.files:
            if not patterns or any(fnmatchcase(name, one) for one in patterns):
                names.append(name)
        verify_content(self.path, self.manifest, names, self.verified)
        return self.path


@dataclass(frozen=True)
class Job:
    """A stage's arguments: spec, inputs, an empty directory to fill, `say` for messages, lock.

    A stage that hashes a file while it writes it puts the SHA-256 into `hashes`, by the path below
    `out`: then the file is not read again to be sealed. It must not change afterwards. `spans` are
    recorded in the manifest's counts.
    """

    spec: Spec
    store: Store
    inputs: Mapping[str, Sealed]
    out: Path
    say: Say
    lock: Lock
    slurm_job: str = ""
    hashes: dict[str, str] = field(default_factory=dict)
    spans: Spans = field(default_factory=Spans)

    @cached_property
    def run_dir(self) -> Path:
        """The working directory of this digest, created if missing; it survives a failure."""
        path = self.store.run_dir(self.spec.digest)
        path.mkdir(parents=True, exist_ok=True)
        return path


StageFunction = Callable[[Job], dict[str, Any]]


def done_lines(ref: Ref) -> tuple[str, str]:
    """Return the starts of the log lines for a stage done now and for one done already.

    `run_stage` writes these lines, for programs that read the log.
    """
    return f"{ref.stage} {ref.digest}: done", f"{ref.stage} {ref.digest}: already done"


def peak_rss_bytes() -> int:
    """Return the larger peak resident memory of this process and of its largest ended child."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) * 1024


def tool_versions() -> dict[str, str]:
    """Return the versions of Python and packages that affect output, and any known git commit."""
    versions = {"python": platform.python_version()}
    for package in RECORDED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    described = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    if described.returncode == 0:
        versions["code"] = described.stdout.strip()
    return versions


# What the libraries of linear algebra choose their code by, and so the last bits of results: vendor
# and instructions.
_INSTRUCTIONS = {  # by the flag in /proc/cpuinfo, the most capable first
    "amx_tile": "AMX",
    "avx512_bf16": "AVX512_BF16",
    "avx512_vnni": "AVX512_VNNI",
    "avx512f": "AVX512",
    "avx_vnni": "AVX2_VNNI",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse4_2": "SSE4.2",
    "sve2": "SVE2",
    "sve": "SVE",
    "asimd": "NEON",
}
_LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


def processor(environ: Mapping[str, str]) -> str:
    """Return this machine's CPU kind, `GenuineIntel AVX512_VNNI`, and limits from `environ`.

    The limits are variables. On CPUs of one kind the same computation gives the same bits.
    """
    info = Path("/proc/cpuinfo")
    vendor = _first_value(info, "vendor_id") or _first_value(info, "CPU implementer")
    flags = (_first_value(info, "flags") or _first_value(info, "Features")).split()
    instructions = next(
        (name for flag, name in _INSTRUCTIONS.items() if flag in flags), platform.machine()
    )
    limits = [f"{name}={environ[name]}" for name in _LIMITS if environ.get(name)]
    return ", ".join([f"{vendor} {instructions}".strip(), *limits])


def machine(environ: Mapping[str, str]) -> str:
    """Describe the kind of machine without naming it.

    For example `64 cores (Intel Xeon; GenuineIntel AVX512_VNNI), 8 x NVIDIA H100, Linux x86_64`.
    """
    cpu = _first_value(Path("/proc/cpuinfo"), "model name") or "CPU"
    parts = [f"{os.cpu_count()} cores ({cpu}; {processor(environ)})"]
    paths = Path("/proc/driver/nvidia/gpus").glob("*/information")
    gpus = [_first_value(path, "Model") for path in paths]
    parts += [f"{gpus.count(kind)} x {kind or 'GPU'}" for kind in sorted(set(gpus))]
    return ", ".join([*parts, f"{platform.system()} {platform.machine()}"])


def _first_value(path: Path, key: str) -> str:
    """Return the value of the first `key: value` line of a system file; empty without one."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (
        value for name, _, value in (line.partition(":") for line in lines) if name.strip() == key
    )
    return " ".join(next(found, "").split())


def open_sealed(ref: Ref, store: Store) -> Sealed:
    """Return the sealed directory of `ref` after checking file names and sizes, not content.

    Raises IntegrityError if it was sealed as another instance or its files do not match,
    Unreadable.
    """
    path = store.sealed(ref)
    manifest = verify_sizes(path)
    if manifest.digest != ref.digest or manifest.stage != ref.stage:
        raise IntegrityError(
            f"{path}: sealed as {manifest.stage} {manifest.digest}; delete it and run snakemake "
            "again"
        )
    return Sealed(path, manifest, store.verified)


def run_stage(
    function: StageFunction,
    spec: Spec,
    store: Store,
    say: Say,
    lock_digest: str | None = None,
    lock_note: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Manifest:
    """Make the sealed directory of `spec` with `function`, and write its pointer for Snakemake.

    A directory that is already sealed is verified and kept. `lock_digest` names the lock where
    several specs share one working directory. `lock_note` is stored in the lock; a SLURM job puts
    its number there as `slurm_job`. Of `environ` the manifest records what limits the CPU.
    """
    final = store.sealed(spec.ref)
    final.parent.mkdir(parents=True, exist_ok=True)
    lock_path = store.lock_path(lock_digest or spec.digest)
    with locked(lock_path, say, note=lock_note) as lock:
        files.sweep(final.parent, final.name)
        if store.is_sealed(spec.ref):
            open_sealed(spec.ref, store).folder()
            say(f"{done_lines(spec.ref)[1]}, verified")
        else:
            # exists but is not sealed: Snakemake and file managers create empty folders
            files.remove_dir(final)
            job_id = str((lock_note or {}).get("slurm_job", ""))
            _make(function, spec, store, say, lock, job_id, machine(environ or {}))
        store.write_pointer(spec.ref)
    return read_manifest(final)


def _make(
    function: StageFunction,
    spec: Spec,
    store: Store,
    say: Say,
    lock: Lock,
    slurm_job: str,
    machine_kind: str,
) -> None:
    started_at = datetime.now(UTC)
    start_s = time.monotonic()
    inputs = {name: open_sealed(ref, store) for name, ref in spec.inputs.items()}
    final = store.sealed(spec.ref)
    with files.disk_full_named(final):
        job = Job(spec, store, inputs, files.stage_dir(final), say, lock, slurm_job)
        try:
            counts = function(job) | job.spans.counts()
            duration_s = time.monotonic() - start_s
            manifest = _manifest_of(job, counts, machine_kind, started_at, duration_s)
            write_manifest(job.out, manifest)

            def last_before_the_rename() -> None:
                _mark_own_files(job, manifest)
                lock.require()

            # another process was faster
            if not files.publish_dir(job.out, final, last_before_the_rename):
                verify(final, store.verified)
        finally:
            shutil.rmtree(job.out, ignore_errors=True)
    say(f"{done_lines(spec.ref)[0]} in {duration_s:.1f} s")


def _mark_own_files(job: Job, manifest: Manifest) -> None:
    """Mark what this stage has written and hashed, so the next does not read it for its hash.

    A file that is linked elsewhere is not this stage's own, and was marked by what linked it.
    """
    for name, entry in manifest.files.items():
        if (job.out / name).stat().st_nlink == 1:
            job.store.verified.mark_own(job.out / name, entry.sha256)


def _manifest_of(
    job: Job, counts: dict[str, Any], machine_kind: str, started_at: datetime, duration_s: float
) -> Manifest:
    return Manifest(
        stage=job.spec.stage,
        digest=job.spec.digest,
        spec={
            **job.spec.to_json(),
            "where": {},
        },  # manifests are shared, and these paths may contain user names
        inputs={
            name: InputEntry(
                stage=sealed.manifest.stage,
                digest=sealed.manifest.digest,
                manifest_sha256=sha256_file(sealed.path / MANIFEST_NAME),
            )
            for name, sealed in job.inputs.items()
        },
        files=describe_files(job.out, job.hashes),
        counts=counts,
        versions=tool_versions(),
        machine=machine_kind,
        job=job.slurm_job,
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=round(duration_s, 3),
        peak_rss_bytes=peak_rss_bytes(),
    )


def say(text: str, end: str = "\n") -> None:
    """Print `text` and `end` to stdout.

    Once its reader is gone, discard output and let the work go on.
    """
    try:
        print(text, end=end, file=sys.stdout, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
