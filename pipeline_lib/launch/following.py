"""The stages that the SLURM job of a training goes on with: its merge and its evaluation.

As jobs of their own they would wait in the queue again. Each is sealed by itself, and one that does
not come to its end here is made by a job of its own, as Snakemake finds it missing.
"""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.launch.allocation import of_job
from pipeline_lib.launch.place import RankPlacement, srun_beside
from pipeline_lib.records.plan import PlannedCluster
from pipeline_lib.slurm.job import SlurmJob


def run_following(
    specs: Sequence[Spec],
    store: Store,
    cluster: PlannedCluster,
    environ: Mapping[str, str],
    say: Say,
) -> None:
    """Run the stages of `specs` one after another on the first node of this process's SLURM job.

    They get the CPUs and GPUs of all ranks there, by `cluster`. The first that fails ends it: what
    follows would need it.
    """
    missing = [spec for spec in specs if not store.pointer(spec.ref).exists()]
    job = SlurmJob.of(environ)
    if job is None or not missing:
        return
    allocation = of_job(job, 1, "the training")
    place = replace(RankPlacement.of(cluster, allocation), nodes=1)
    inherited = dict(environ)
    for spec in missing:
        say(f"---- {spec.stage} in the job of the training, on {allocation.hosts[0]}")
        path = store.spec_path(spec.digest).absolute()
        command = srun_beside(place, inherited, [spec.stage, "--spec", str(path)])
        ended = subprocess.run(command, env=inherited, check=False)
        if ended.returncode:
            say(
                f"{spec.stage} {spec.digest}: ended here with exit code {ended.returncode}; "
                "a job of its own makes it"
            )
            return
