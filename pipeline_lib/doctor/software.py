"""Versions of what is installed, and the variables that change how a run behaves."""

import importlib.metadata
import platform
import re
from collections.abc import Mapping

from packaging.requirements import Requirement

from pipeline_lib.base.redact import redact
from pipeline_lib.doctor.facts import Section, Unmeasured

PROJECT = "qwen3-pipeline"
PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "snakemake", "dvc", "nvidia-ml-py")
# No others are shown: any may hold a secret.
VARIABLES = re.compile(
    r"(NCCL|TORCH_NCCL|GLOO|NVSHMEM|TORCH_SYMM_MEM|OMP|MKL|CUBLAS|PYTORCH)_[A-Z_]+|CUDA_(VISIBLE_DEVICES|HOME)"
    r"|SLURM_(JOB_ID|JOB_NODELIST|JOB_PARTITION|NNODES|NTASKS|NTASKS_PER_NODE|CPUS_PER_TASK|GPUS|GPUS_ON_NODE|PROCID"
    r"|LOCALID|JOB_END_TIME|MEM_PER_NODE)"
)


def versions() -> Section:
    """Python's and those of the packages that matter, by name."""
    found: Section = {"python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def out_of_range() -> Section:
    """Packages whose installed version this project does not take, with what it takes. Raises Unmeasured."""
    try:
        wanted = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise Unmeasured(f"{PROJECT} itself is not installed by pip") from error
    found: Section = {}
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None:  # of an extra
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found[requirement.name] = f"not installed, wanted {requirement.specifier}"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            found[requirement.name] = f"{version}, wanted {requirement.specifier}"
    return found


def variables(environ: Mapping[str, str]) -> Section:
    """Variables of `environ` that matter, without what looks like a secret."""
    return {name: redact(value) for name, value in sorted(environ.items()) if VARIABLES.fullmatch(name)}
