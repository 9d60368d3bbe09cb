"""All that is said of experiments before anything runs: one list, whoever prints it.

`check`, `plan`, `snakemake -n` and the rules differ only in whom they may ask beside the config and
the store.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.config.content import read_content
from pipeline_lib.config.findings import Finding, finding_of, merged, refusals, refuse
from pipeline_lib.config.schema import Cluster, Config
from pipeline_lib.config.warnings import warnings_of
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.launch.allocation import idle_gpus, refuse_now
from pipeline_lib.plan.known import is_sealed
from pipeline_lib.plan.preflight import lacking_to_train, wrong_with
from pipeline_lib.plan.warnings import on_evaluation, on_memory, on_steps
from pipeline_lib.slurm.can_start import srun_without_jobs, why_not_submitted
from pipeline_lib.slurm.cluster import NodeGroup
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from pipeline_lib.slurm.sizing import too_long_evaluation
from pipeline_lib.workflow.exports import on_export
from pipeline_lib.workflow.rows import on_rows

Ask = Callable[[Config], Iterable[Finding]]


def findings_of(configs: Sequence[Config], store: Store, ask: Ask) -> list[Finding]:
    """Return all findings of the experiments `configs` of a file: refusals first, then warnings.

    Each is returned once. `ask` returns those that only the machines of a training can tell. Of an
    experiment that is done, no more is said than what is wrong with it by now.
    """
    return merged([(config.experiment, list(_of_one(config, store, ask))) for config in configs])


def _of_one(config: Config, store: Store, ask: Ask) -> Iterator[Finding]:
    yield from _wrong(config, store)
    if is_sealed(config, store, "report"):
        return
    yield from lacking_to_train(config, store)
    yield from warnings_of(config)
    if not is_sealed(config, store, "tokenize"):
        yield from on_rows(config)
    yield from on_steps(config, store)
    yield from on_memory(config, store)
    yield from on_evaluation(config, store)
    yield from ask(config)


def _wrong(config: Config, store: Store) -> list[Finding]:
    """Return the refusals of what is wrong in any case, files that are not there first."""
    found: list[Finding] = []
    try:
        read_content(config, Path(), None)
    except ConfigError as error:
        found += refusals(error.problems)
    return [*found, *wrong_with(config, store), *on_export(config, store)]


def refuse_wrong(config: Config, store: Store) -> None:
    """Raise ConfigError with what is wrong in any case, so that no data or plan can be made."""
    refuse(_source_of(config), _wrong(config, store))


def refuse_impossible(config: Config, store: Store) -> None:
    """Raise ConfigError with all reasons why the config cannot be trained, asking no machine."""
    refuse(_source_of(config), [*_wrong(config, store), *lacking_to_train(config, store)])


def _source_of(config: Config) -> str:
    return f"experiment {config.experiment!r}"


class ThisMachine:
    """Asks this machine whether its GPUs would be used; each kind of cluster is asked for once."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Ask it about processes with `environ`."""
        self._environ = environ
        self._findings: dict[Cluster, list[Finding]] = {}

    def __call__(self, config: Config) -> list[Finding]:
        """Return what it says of a training with `config`."""
        cluster = config.cluster
        if cluster not in self._findings:  # to look for GPUs takes seconds
            self._findings[cluster] = list(self._of_cluster(cluster))
        return self._findings[cluster]

    def _of_cluster(self, cluster: Cluster) -> Iterator[Finding]:
        yield from srun_without_jobs(cluster, self._environ)
        yield from idle_gpus(cluster)


class TrainingMachines(ThisMachine):
    """Asks all machines that a training is about to be started on, over ssh too."""

    def __init__(self, environ: Mapping[str, str], store: Store, say: Say) -> None:
        """Ask them about `store`; `say` is told which are ready."""
        super().__init__(environ)
        self._store = store
        self._say = say

    def _of_cluster(self, cluster: Cluster) -> Iterator[Finding]:
        yield from super()._of_cluster(cluster)
        try:
            refuse_now(cluster, self._store, self._environ, self._say)
        except ConfigError as error:
            yield from _with_source(error.source, error.problems)


@dataclass(frozen=True)
class SlurmCluster:
    """Asks SLURM, which jobs are about to be submitted to, whether it would run them.

    `groups` are its nodes, `request_of` says what a training asks for, and `options` are further
    options of sbatch for it.
    """

    store: Store
    site: Site
    groups: list[NodeGroup]
    request_of: Callable[[Config], JobRequest]
    options: Sequence[str]

    def __call__(self, config: Config) -> Iterator[Finding]:
        """Yield what it says of a training with `config`, and of its evaluation."""
        request = self.request_of(config)
        problems = why_not_submitted(self.site, request, self.groups, self.options)
        yield from _with_source("the cluster", problems)
        yield from too_long_evaluation(config, self.store, self.site, self.groups)


def _with_source(source: str, problems: Iterable[str]) -> Iterator[Finding]:
    """Yield refusals, each of which begins with its key or with `source`."""
    for problem in problems:
        found = finding_of("refusal", problem)
        yield found if found.key else finding_of("refusal", f"{source}: {problem}")
