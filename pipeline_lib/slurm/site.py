"""What a site wants to be told with every job: a small file of the user's, and variables that go before it.

Nothing of it belongs into an experiment's config or into the repository: it changes with the cluster, and decides
nothing of what is computed.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.schema import Section
from pipeline_lib.core.errors import ConfigError

FILE_VARIABLE = "PIPELINE_SITE"
USUAL_PLACE = Path("qwen3-pipeline") / "site.yaml"  # below $XDG_CONFIG_HOME, else ~/.config
VARIABLES = {
    "account": "PIPELINE_SLURM_ACCOUNT",
    "partition": "PIPELINE_SLURM_PARTITION",
    "cpu_partition": "PIPELINE_SLURM_CPU_PARTITION",
    "qos": "PIPELINE_SLURM_QOS",
    "constraint": "PIPELINE_SLURM_CONSTRAINT",
    "scratch": "PIPELINE_SCRATCH",
}


class Site(Section):
    """The keys of the site file; none is required."""

    account: str | None = Field(None, description="whom jobs are charged to (sbatch --account)")
    partition: str | None = Field(None, description="of the training and the evaluation, and of all if it is alone")
    cpu_partition: str | None = Field(None, description="of the stages that need no GPU")
    qos: str | None = Field(None, description="quality of service (sbatch --qos)")
    constraint: str | None = Field(None, description="features of the nodes to train on (sbatch --constraint)")
    setup: tuple[str, ...] = Field((), description="shell lines before each stage in its job, as `module load cuda`")
    environment: dict[str, str] = Field({}, description="variables of every job, as `NCCL_IB_HCA: mlx5`")
    scratch: str | None = Field(None, description="fast folder of each node, for temporary files and compiler caches")

    @field_validator("environment", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """`NCCL_NVLS_ENABLE: 0` is a number in YAML, and text in an environment."""
        if not isinstance(value, dict):
            return value
        return {key: str(item) if isinstance(item, int | float) else item for key, item in value.items()}

    @staticmethod
    def load(environ: Mapping[str, str]) -> "Site":
        """The file that PIPELINE_SITE names, else the usual one if there is one. Raises ConfigError."""
        path = site_file(environ)
        values: dict[str, Any] = {}
        if path is not None:
            document = strict_yaml.load(path)
            if document.problems:
                raise ConfigError(str(path), document.problems)
            if not isinstance(document.value, dict | None):
                raise ConfigError(str(path), ["the file: keys with values are wanted, as `account: mine`"])
            values = document.value or {}
        given = {key: environ[name] for key, name in VARIABLES.items() if environ.get(name)}
        try:
            return Site.model_validate_json(json.dumps({**values, **given}))
        except ValidationError as error:
            raise ConfigError(str(path or "the environment"), _problems(error)) from error

    def partition_of(self, is_training: bool) -> str | None:
        """Where a job goes; None leaves it to SLURM."""
        return self.partition if is_training else self.cpu_partition or self.partition

    def sbatch_options(self, is_training: bool) -> list[str]:
        """The same for sbatch, salloc and srun."""
        options = {
            "account": self.account,
            "partition": self.partition_of(is_training),
            "qos": self.qos,
            "constraint": self.constraint if is_training else None,
        }
        return [f"--{name}={value}" for name, value in options.items() if value]

    def variables(self) -> dict[str, str]:
        """What every job has in its environment, beside what it inherits. They may be secrets: print none."""
        if self.scratch is None:
            return self.environment
        caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        found = {name: f"{self.scratch}/{folder}" for name, folder in caches.items()}
        return {"TMPDIR": self.scratch, **found, **self.environment}

    def exports(self) -> str:
        """The variables as a shell reads them."""
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.variables().items())

    def shell_lines(self) -> str:
        """What a job's shell runs first. Of the variables it is told by a program: Snakemake prints its commands."""
        return "".join(f"{line}\n" for line in self.setup)


def site_file(environ: Mapping[str, str]) -> Path | None:
    """Where the site file is. One that PIPELINE_SITE names has to be there, the usual one need not."""
    if chosen := environ.get(FILE_VARIABLE):
        return Path(chosen)
    folder = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/")) / ".config")
    path = Path(folder) / USUAL_PLACE
    return path if path.exists() else None


def _problems(error: ValidationError) -> list[str]:
    known = ", ".join(Site.model_fields)
    found = []
    for one in error.errors():
        key = ".".join(map(str, one["loc"])) or "the file"
        is_unknown = one["type"] == "extra_forbidden"
        found.append(f"{key}: {f'there is no such key; there are {known}' if is_unknown else one['msg']}")
    return found
