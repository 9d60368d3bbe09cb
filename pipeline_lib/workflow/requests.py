"""What the rules ask of the machines: threads and GPUs of this one, or resources of jobs."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.config.stages import OPENS_WEIGHTS, STAGES, JobKind
from pipeline_lib.launch.local_gpus import visible_gpus
from pipeline_lib.plan.stages import TOKENIZE_CPUS
from pipeline_lib.slurm.cluster import NodeGroup, fitted, groups_of
from pipeline_lib.slurm.request import (
    EXTRA,
    OF_STAGE,
    OF_TRAINING,
    JobRequest,
    given_options,
    stage_resources,
    training_resources,
)
from pipeline_lib.slurm.sizing import (
    Foresight,
    most_cpus_of,
    sealed_bytes,
    sealed_plan,
    stage_request,
    training_request,
)
from pipeline_lib.workflow.invocation import Invocation

ResourceFunction = Callable[[Any], Any]  # of a rule's wildcards, as Snakemake calls it
_ALL_RULES = ""


class SbatchOptions:
    """The options of sbatch that the user gave on the command line, as `slurm_extra`."""

    def __init__(self, settings: Any) -> None:
        """Take them out of Snakemake's resource `settings`.

        Left where they are, those of a rule would take the place of the ones that the rule sets
        itself. Raises ConfigError.
        """
        self._given = {_ALL_RULES: given_options(settings.default_resources or {}, "all rules")}
        for name, resources in dict(settings.overwrite_resources).items():
            self._given[name] = given_options(resources, name)
            left = {key: value for key, value in resources.items() if key != EXTRA}
            settings.overwrite_resources[name] = type(resources)(left)

    def of(self, rule: str) -> tuple[str, ...]:
        """Return those given for all rules, and those for `rule`."""
        return (*self._given[_ALL_RULES], *self._given.get(rule, ()))


class Requests:
    """What stage instances take of this machine, or ask SLURM for."""

    def __init__(
        self, invocation: Invocation, options: SbatchOptions, environ: Mapping[str, str]
    ) -> None:
        """Answer for the experiments of `invocation`; `environ` says which GPUs may be used."""
        self._invocation = invocation
        self._dag = invocation.dag
        self._site = invocation.site
        self._options = options
        self._environ = environ
        self._foresight = Foresight(self._dag.store)
        self._stages: dict[tuple[JobKind, str, int, int | None], JobRequest] = {}
        self._trainings: dict[tuple[str, bool, int], JobRequest] = {}

    # Shares of this machine.

    def tokenize_threads(self) -> int:
        """Return all cores of a local run, where nothing else is ready; else those of its job."""
        invocation = self._invocation
        return invocation.workflow.cores if invocation.is_here else TOKENIZE_CPUS

    def training_threads(self, digest: str) -> int:
        """Return those of all ranks on a machine; of a job each task has its own."""
        cluster = self._dag.config_of(digest).cluster
        return self._threads_with_gpus(cluster.gpus_per_node, cluster.cpus_per_node)

    def threads(self, kind: JobKind, digest: str) -> int:
        """Return those of a job of that kind; no more are used than there are."""
        request = self.of_stage(kind, digest)
        return self._threads_with_gpus(request.gpus_per_node, request.cpus_per_task)

    def gpus(self, kind: JobKind, digest: str) -> int:
        """Return how many GPUs of this machine a stage takes; a job has its scheduler's."""
        return self.of_stage(kind, digest).gpus_per_node if self._invocation.is_here else 0

    def _threads_with_gpus(self, gpus: int, cpus: int) -> int:
        """Return `cpus`, or of a stage here with GPUs as large a share of the cores as of the GPUs.

        So many such stages run at a time as have GPUs of their own.
        """
        if not gpus or not self._invocation.is_here:
            return cpus
        cores: int = self._invocation.workflow.cores
        return max(1, cores * gpus // max(gpus, self._gpus_here))

    @cached_property
    def _gpus_here(self) -> int:
        return len(visible_gpus(self._environ))

    # Jobs.

    def of_stage(self, kind: JobKind, digest: str, most_cpus: int | None = None) -> JobRequest:
        """Return what a job of that kind asks for, and anew when all that it reads is there.

        Of files of weights only the kinds that open them count the bytes.
        """
        read_bytes = self._bytes_read_by(digest, with_weights=kind in OPENS_WEIGHTS)
        key = (kind, digest, read_bytes, most_cpus)
        if key not in self._stages:
            config = self._dag.config_of(digest)
            self._stages[key] = stage_request(kind, config, self._dag.store, read_bytes, most_cpus)
        return self._stages[key]

    def of_training(self, digest: str) -> JobRequest:
        """Return what the training asks for; a sealed plan knows more than what is foreseen.

        Raises IntegrityError, Unreadable.
        """
        plan = Path(self._dag.plan_pointer(digest))
        is_planned = plan.exists()
        read_bytes = self._bytes_read_by(digest, with_weights=True)
        key = (digest, is_planned, read_bytes)
        if key not in self._trainings:
            config = self._dag.config_of(digest)
            known = sealed_plan(plan) if is_planned else self._foresight.plan_of(config)
            nodes = self._nodes(self._site.partition)
            self._trainings[key] = training_request(
                config, known, nodes, read_bytes, self._following(digest, read_bytes)
            )
        return self._trainings[key]

    def _following(self, digest: str, base_bytes: int) -> list[JobRequest]:
        """Return what the stages would ask for that the training's job goes on with.

        Each reads the model of `base_bytes` and what was trained of it, which is no larger.
        """
        if not self._invocation.has_one_job_per_training:
            return []
        config = self._dag.config_of(digest)
        found = []
        for spec in self._dag.following(digest):
            kind = STAGES[spec.stage].job
            if kind is not None:
                found.append(stage_request(kind, config, self._dag.store, 2 * base_bytes))
        return found

    def _bytes_read_by(self, digest: str, *, with_weights: bool) -> int:
        return sealed_bytes(self._dag.pointers_read_by(digest), with_weights)

    def _nodes(self, partition: str | None) -> list[NodeGroup]:
        """Return SLURM's nodes of `partition` where jobs are about to be submitted, else none."""
        return groups_of(partition, self._invocation.node_groups)

    def job(self, rule: str, kind: JobKind) -> dict[str, ResourceFunction]:
        """Return all resources of a rule whose jobs have one task."""

        def resources(wildcards: Any) -> Mapping[str, Any]:
            most_cpus = most_cpus_of(self._nodes(self._site.partition_of(is_training=False)))
            asked = self.of_stage(kind, wildcards.digest, most_cpus)
            partition = self._site.partition_of(is_training=asked.gpus_per_node > 0)
            request = fitted(asked, self._nodes(partition))
            return stage_resources(request, self._site, self._options.of(rule))

        return _each_of(resources, OF_STAGE)

    def training_job(self, rule: str) -> dict[str, ResourceFunction]:
        """Return all resources of a rule whose jobs have a task for each rank."""

        def resources(wildcards: Any) -> Mapping[str, Any]:
            request = self.of_training(wildcards.digest)
            return training_resources(request, self._site, self._options.of(rule))

        return _each_of(resources, OF_TRAINING)


def _each_of(
    resources: Callable[[Any], Mapping[str, Any]], names: Iterable[str]
) -> dict[str, ResourceFunction]:
    """Return a function for each of the resources `names`, as Snakemake wants it."""

    def function_of(name: str) -> ResourceFunction:
        return lambda wildcards: resources(wildcards)[name]

    return {name: function_of(name) for name in names}
