"""Versions of installed packages, and environment variables that affect a run."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping

from packaging.requirements import Requirement

from pipeline_lib.core.text import redact
from pipeline_lib.doctor.facts import Section, Unmeasured

PROJECT = "qwen3-pipeline"
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "deepspeed",
    "accelerate",
    "snakemake",
    "dvc",
    "nvidia-ml-py",
)
# Only these variables are shown, since any other may hold a secret.
VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|NVSHMEM|TORCH_SYMM_MEM|OMP|MKL|CUBLAS|PYTORCH)_[A-Z_]+|CUDA_(VISIBLE_DEVICES|HOME)"
    r"|SLURM_(JOB_ID|JOB_NODELIST|JOB_PARTITION|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS|GPUS_ON_NODE|PROCID"
    r"|LOCALID|JOB_END_TIME|MEM_PER_NODE)"
)


def versions() -> Section:
    """Return the versions of Python, the system and the relevant packages, by name."""
    installed = {package: _version(package) or "not installed" for package in PACKAGES}
    return {"python": platform.python_version(), "system": platform.platform(), **installed}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def out_of_range() -> Section:
    """Return packages whose installed version is outside the project's range, with that range.

    Raise Unmeasured.
    """
    try:
        wanted = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise Unmeasured(f"{PROJECT} itself is not installed by pip") from error
    found: Section = {}
    for requirement in map(Requirement, wanted):
        if requirement.marker is None:  # else it belongs to an extra
            version = _version(requirement.name)
            if version is None or not requirement.specifier.contains(version, prereleases=True):
                found[requirement.name] = (
                    f"{version or 'not installed'}, wanted {requirement.specifier}"
                )
    return found


def variables(environ: Mapping[str, str]) -> Section:
    """Return the relevant variables of `environ`, with secrets redacted."""
    return {
        name: redact(value) for name, value in sorted(environ.items()) if VARIABLES.fullmatch(name)
    }
