"""Read what a site needs in every SLURM job, and its hosts without SLURM, from a user's file.

Environment variables override it. None of it belongs in an experiment's config or in the
repository: it changes with the cluster and does not affect results.
"""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from pipeline_lib.config import strict_yaml
from pipeline_lib.config.section import Section
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
    "hosts": "PIPELINE_HOSTS",
    "interface": "PIPELINE_INTERFACE",
}


# Options of sbatch that cannot be among the further ones of the site file, with the reason.
_A_KEY = "it has a key of its own in the site file"
_THE_PLAN = "the plan, or a key of `cluster` in the config, sets it"
OF_THE_JOB = "the pipeline needs it as it sets it"
_TAKEN = {
    **dict.fromkeys(
        ("account", "partition", "qos", "constraint", "reservation", "exclude"), _A_KEY
    ),
    **dict.fromkeys(
        ("gres", "gpus", "gpus-per-node"), "use `gpu_type` in the site file for the kind of GPU"
    ),
    **dict.fromkeys(
        ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "mem", "mem-per-cpu", "time"),
        _THE_PLAN,
    ),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu"), _THE_PLAN),
    **dict.fromkeys(
        ("signal", "open-mode", "job-name", "output", "error", "comment", "export", "chdir"),
        OF_THE_JOB,
    ),
    **dict.fromkeys(("parsable", "wrap", "array", "clusters", "requeue", "no-requeue"), OF_THE_JOB),
}
_OPTION = re.compile(r"--(?P<name>[a-z][a-z-]*)(=.*)?", re.DOTALL)


class Site(Section):
    """The keys of the site file; none is required."""

    account: str | None = Field(
        None, description="account that jobs are charged to (sbatch --account)"
    )
    partition: str | None = Field(
        None,
        description="partition for training and evaluation; for all stages without cpu_partition",
    )
    cpu_partition: str | None = Field(None, description="partition for the stages that need no GPU")
    cpu_account: str | None = Field(
        None, description="account of the stages that need no GPU; default: `account`"
    )
    qos: str | None = Field(None, description="quality of service (sbatch --qos)")
    cpu_qos: str | None = Field(
        None, description="quality of service of the stages that need no GPU; default: `qos`"
    )
    constraint: str | None = Field(
        None, description="features of the nodes to train on (sbatch --constraint)"
    )
    gpu_type: str | None = Field(
        None, description="kind of GPU that jobs ask for, as in `--gres gpu:h100:8`"
    )
    reservation: str | None = Field(
        None, description="reservation of all jobs (sbatch --reservation)"
    )
    exclude: str | None = Field(None, description="nodes that no job shall get (sbatch --exclude)")
    sbatch: tuple[str, ...] = Field(
        (), description="further options of all jobs, such as `--mail-type=FAIL`"
    )
    gpu_sbatch: tuple[str, ...] = Field(
        (), description="further options of jobs on GPUs: training, merge, evaluation"
    )
    cpu_sbatch: tuple[str, ...] = Field((), description="further options of the other stages")
    setup: tuple[str, ...] = Field(
        (), description="shell lines before each stage in its job, such as `module load cuda`"
    )
    environment: dict[str, str] = Field(
        {}, description="variables of every job, such as `NCCL_IB_HCA: mlx5`"
    )
    scratch: str | None = Field(
        None, description="fast folder of each node, for temporary files and compiler caches"
    )
    short_stages_as_jobs: bool = Field(False, description="submit plan and report as jobs too")
    one_job_per_training: bool = Field(
        True,
        description="the job of a training goes on with its merge and evaluation, which would wait "
        "in the queue again as jobs of their own",
    )
    hosts: tuple[str, ...] | str = Field(
        (),
        description="machines to train on without SLURM, as ssh knows them; or the path of a "
        "DeepSpeed hostfile",
    )
    interface: str | None = Field(
        None,
        description="network interface between the hosts, such as `ib0`; default: one by which all "
        "are reached",
    )

    @field_validator("sbatch", "gpu_sbatch", "cpu_sbatch")
    @classmethod
    def _as_options(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        """Refuse what is not `--name` or `--name=value`, and options that the pipeline sets."""
        for value in values:
            match = _OPTION.fullmatch(value)
            if match is None:
                raise ValueError(f"{value!r} is no option of the form --name or --name=value")
            if reason := _TAKEN.get(match["name"]):
                raise ValueError(f"{value!r} cannot be set here: {reason}")
        return values

    @field_validator("environment", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        """Turn numbers into text: `NCCL_NVLS_ENABLE: 0` is a number only in YAML."""
        if not isinstance(value, dict):
            return value
        return {
            key: str(item) if isinstance(item, int | float) else item for key, item in value.items()
        }

    @staticmethod
    def load(environ: Mapping[str, str]) -> "Site":
        """Load the file that PIPELINE_SITE names, else the one in the usual place if it exists.

        Raises ConfigError.
        """
        path = site_file(environ)
        values: dict[str, Any] = {}
        if path is not None:
            document = strict_yaml.load(path)
            if document.problems:
                raise ConfigError(str(path), document.problems)
            if not isinstance(document.value, dict | None):
                raise ConfigError(
                    str(path),
                    ["the file: it must contain keys with values, such as `account: mine`"],
                )
            values = document.value or {}
        given = {key: environ[name] for key, name in VARIABLES.items() if environ.get(name)}
        try:
            return Site.model_validate_json(json.dumps({**values, **given}))
        except ValidationError as error:
            unknown = f"unknown key; known keys: {', '.join(Site.model_fields)}"
            problems = []
            for one in error.errors():
                key = ".".join(map(str, one["loc"])) or "the file"
                problems.append(
                    f"{key}: {unknown if one['type'] == 'extra_forbidden' else one['msg']}"
                )
            raise ConfigError(str(path or "the environment"), problems) from error

    def partition_of(self, is_training: bool) -> str | None:
        """Return the partition of a job; None leaves the choice to SLURM."""
        return self.partition if is_training else self.cpu_partition or self.partition

    def job_options(self, is_training: bool) -> dict[str, str | None]:
        """Return a job's options by the names of sbatch, salloc and srun; None omits one."""
        return {
            "account": self.account if is_training else self.cpu_account or self.account,
            "partition": self.partition_of(is_training),
            "qos": self.qos if is_training else self.cpu_qos or self.qos,
            "constraint": self.constraint if is_training else None,
            "reservation": self.reservation,
            "exclude": self.exclude,
        }

    def further_options(self, is_training: bool) -> tuple[str, ...]:
        """Return the options of a job that have no key of their own."""
        return self.sbatch + (self.gpu_sbatch if is_training else self.cpu_sbatch)

    def gres(self, gpus: int) -> str | None:
        """Return what a job with `gpus` GPUs a node asks for (sbatch --gres); None without."""
        kind = f":{self.gpu_type}" if self.gpu_type else ""
        return f"gpu{kind}:{gpus}" if gpus else None

    def variables(self) -> dict[str, str]:
        """Return the variables that every job gets besides those it inherits.

        They may be secrets: never print them.
        """
        if self.scratch is None:
            return self.environment
        caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        found = {name: f"{self.scratch}/{folder}" for name, folder in caches.items()}
        return {"TMPDIR": self.scratch, **found, **self.environment}

    def exports(self) -> str:
        """Return the variables as export lines for a shell."""
        return "".join(
            f"export {name}={shlex.quote(value)}\n" for name, value in self.variables().items()
        )

    def shell_lines(self) -> str:
        """Return the lines that a job's shell runs first.

        They leave out the variables, which a program sets, because Snakemake prints its shell
        commands.
        """
        return "".join(f"{line}\n" for line in self.setup)


def site_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the site file; None if the usual one does not exist.

    One in PIPELINE_SITE may be missing.
    """
    if chosen := environ.get(FILE_VARIABLE):
        return Path(chosen)
    folder = environ.get("XDG_CONFIG_HOME") or str(Path(environ.get("HOME", "/")) / ".config")
    path = Path(folder) / USUAL_PLACE
    return path if path.exists() else None
