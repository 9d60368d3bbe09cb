"""One call of snakemake, as its rules ask it: its experiments, what is told first, and refused."""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from pipeline_lib.config.dag import FROZEN_VARIABLE, RESULTS, Dag
from pipeline_lib.config.findings import Finding, refuse
from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.files import unwritable
from pipeline_lib.core.stage import Say, say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.plan.known import learn_architecture
from pipeline_lib.report.outcomes import LOGS
from pipeline_lib.slurm.cluster import NodeGroup, read_groups
from pipeline_lib.slurm.queue import wait_for_jobs
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from pipeline_lib.slurm.sizing import refuse_long_evaluation
from pipeline_lib.workflow.findings import (
    Ask,
    SlurmCluster,
    ThisMachine,
    TrainingMachines,
    findings_of,
    refuse_wrong,
)

WANTED_VARIABLE = "PIPELINE_WANTED_RULES"  # of the jobs: the rules that snakemake wants to run


def rule_of(stage: str) -> str:
    """Return the name of the rule that makes instances of `stage`."""
    return f"{stage}_stage"


class Workflow(Protocol):
    """What is asked of Snakemake's own `workflow`."""

    @property
    def is_main_process(self) -> bool:
        """Whether this process decides what to run, and is not one that a job has started."""

    @property
    def local_exec(self) -> bool:
        """Whether stages are processes of this machine, and not jobs of a cluster."""

    @property
    def remote_exec(self) -> bool:
        """Whether this process runs in a job that a snakemake has submitted."""

    @property
    def executor_plugin(self) -> object | None:
        """What runs the jobs; None where nothing is to be run, as for `--summary`."""

    @property
    def dryrun(self) -> bool:
        """Whether it is `-n`."""

    @property
    def touch(self) -> bool:
        """Whether outputs are only stamped."""

    @property
    def cores(self) -> int:
        """The cores that stages of this machine share."""

    @property
    def iocache(self) -> Any:
        """Which files exist, as far as Snakemake has looked."""

    @property
    def overwrite_configfiles(self) -> Iterable[Path]:
        """The config files of the command line."""

    @property
    def config_settings(self) -> Any:
        """What `--config` gave, as `config`."""


def open_dag(
    workflow: Workflow,
    store: Store,
    environ: MutableMapping[str, str],
    tell: Say,
    given: Mapping[str, object] | None = None,
) -> Dag:
    """Return the experiments: compiled in the main process, else those that it has frozen.

    `given` is the config of a workflow that uses this one as its module, None for a config file.
    Raises ConfigError for what is wrong in any case, HubError, IntegrityError, and OSError.
    """
    if not workflow.is_main_process and FROZEN_VARIABLE in environ:
        return Dag.thaw(Path(environ[FROZEN_VARIABLE]), store)
    refuse_here = partial(refuse_wrong, store=store)
    learn = partial(learn_architecture, store=store, say=tell)
    if given is None:
        files = [str(path) for path in workflow.overwrite_configfiles]
        dag = Dag.compile(files, workflow.config_settings.config, store, refuse_here, learn)
    else:
        dag = Dag.of_mapping(given, store, refuse_here, learn)
    _refuse_unwritable_folders(dag)
    environ[FROZEN_VARIABLE] = str(dag.frozen_path)
    return dag


def _refuse_unwritable_folders(dag: Dag) -> None:
    """Raise ConfigError for folders here that cannot be written: Snakemake's own, and results.

    Snakemake itself would end with a traceback of them.
    """
    folders = [Path(".snakemake"), LOGS, *sorted(LOGS.glob("*/"))]
    folders += [RESULTS / one.name for one in dag.experiments]
    problems = list(dict.fromkeys(filter(None, map(unwritable, folders))))
    if problems:
        remedy = "; make it a folder that can be written, or run snakemake in another"
        raise ConfigError("this folder", [problem + remedy for problem in problems])


class Invocation:
    """One call of snakemake for the experiments of `dag`."""

    def __init__(
        self,
        workflow: Workflow,
        dag: Dag,
        site: Site,
        environ: MutableMapping[str, str],
        tell: Say,
    ) -> None:
        """Findings and what happens before the jobs go to `tell`."""
        self.workflow = workflow
        self.dag = dag
        self.site = site
        self._tell = tell
        self._has_begun = False
        self._said: set[Finding] = set()
        self._judged: set[tuple[str, str]] = set()  # by rule, and by name of the experiment
        self._environ = environ
        self._this_machine = ThisMachine(environ)
        self._machines = TrainingMachines(environ, dag.store, tell)

    @property
    def is_here(self) -> bool:
        """Whether stages run in this machine's cores, and not as jobs."""
        return self.workflow.local_exec and self.workflow.is_main_process

    @property
    def has_one_job_per_training(self) -> bool:
        """Whether the job of a training of a cluster goes on with its merge and evaluation."""
        return not self.workflow.local_exec and self.site.one_job_per_training

    @property
    def will_run(self) -> bool:
        """Whether it runs anything: not for `-n`, `--summary`, `--dag` and others that look."""
        return self.workflow.executor_plugin is not None and not self.workflow.dryrun

    @cached_property
    def node_groups(self) -> list[NodeGroup]:
        """The nodes of SLURM where jobs are about to be submitted to it; else none.

        They are returned once no earlier job makes the same. Raises ConfigError.
        """
        if not self.workflow.is_main_process or self.workflow.local_exec:
            return []
        # Imported here because only clusters need the plugin.
        from pipeline_lib.slurm.plugin import (
            outlive_a_silent_controller,
            submit_only_what_is_missing,
        )

        outlive_a_silent_controller()
        submit_only_what_is_missing()
        groups = read_groups()
        wait_for_jobs(self.dag.titles(), Path.cwd(), say)
        return groups

    def begin(self) -> None:
        """Tell the findings and freeze the experiments, once, before Snakemake looks for files.

        Each function of inputs calls it first: Snakemake knows by then whether it runs anything.
        One that runs nothing writes nothing; pointers to what is missing are then hidden from it.
        Raises PipelineError, OSError.
        """
        if self._has_begun or not self.workflow.is_main_process:
            return
        self._has_begun = True
        configs = [one.config for one in self.dag.experiments]
        ask: Ask = self._this_machine if self.workflow.local_exec else _ask_nobody
        self._say_new(findings_of(configs, self.dag.store, ask))
        if self.will_run:
            self.dag.freeze()
            self.dag.link_results()
            return
        hidden = dict.fromkeys(map(str, self.dag.dangling_pointers()), False)
        if hidden:
            self.workflow.iocache.exists_local.update(hidden)
            # a listing of the folder would show them
            self.workflow.iocache.remaining_wait_time = 0

    def note_wanted(self, rules: Iterable[str]) -> None:
        """Tell the jobs which `rules` are about to run, by the environment that they inherit."""
        self._environ[WANTED_VARIABLE] = ",".join(sorted(set(rules)))

    def following(self, digest: str) -> list[Spec]:
        """Return the stage instances that the job of the training `digest` goes on with.

        Those are its merge and evaluation in a job of a cluster, as far as Snakemake wants them.
        """
        if not (self.workflow.remote_exec and self.site.one_job_per_training):
            return []
        wanted = self._environ.get(WANTED_VARIABLE, "").split(",")
        return [spec for spec in self.dag.following(digest) if rule_of(spec.stage) in wanted]

    def stage_inputs(self, digest: str, *, is_to_rung: bool = False) -> list[str]:
        """Return the pointers that the stage instance `digest` reads or waits for.

        Raises PipelineError, OSError.
        """
        self.begin()
        _ = self.node_groups  # which waits for earlier jobs
        return self.dag.pointers_read_by(digest, is_to_rung=is_to_rung)

    def refuse_training(
        self,
        digest: str,
        rule: str,
        request_of: Callable[[str], JobRequest],
        options: Iterable[str],
    ) -> None:
        """Raise ConfigError with all that keeps the trainings on the way with `digest` from running.

        What is only planned is never refused, and a training that was let through is not asked for
        again: what it writes itself counts against the disk. `request_of` returns what the job of a
        training asks SLURM for, by digest, and `options` are further ones for that `rule`.
        """
        self.begin()
        if self.workflow.remote_exec and not self.workflow.is_main_process:
            refuse_long_evaluation(self.dag.config_of(digest), self.dag.store, self.site)
        if not self.workflow.is_main_process or self.dag.is_trained(digest):
            return
        open_ones = [
            one for one in self.dag.to_train(digest) if (rule, one.name) not in self._judged
        ]
        self._judged.update((rule, one.name) for one in open_ones)
        digests = {one.name: one.ref("train").digest for one in open_ones}

        def request(config: Config) -> JobRequest:
            return request_of(digests[config.experiment])

        ask = self._whom_to_ask(request, tuple(options))
        found = findings_of([one.config for one in open_ones], self.dag.store, ask)
        self._say_new(found)
        refuse(f"experiment {self.dag.name!r}", found)

    def _whom_to_ask(
        self, request: Callable[[Config], JobRequest], options: tuple[str, ...]
    ) -> Ask:
        if self.node_groups:
            return SlurmCluster(self.dag.store, self.site, self.node_groups, request, options)
        if self.will_run and not self.workflow.touch:
            return self._machines
        return self._this_machine

    def _say_new(self, findings: Iterable[Finding]) -> None:
        """Say each warning and note once, however often it is found."""
        for finding in findings:
            if finding.kind != "refusal" and finding not in self._said:
                self._said.add(finding)
                self._tell(finding.line)


def _ask_nobody(_: Config) -> list[Finding]:
    """Ask no machine: the training runs on others."""
    return []
