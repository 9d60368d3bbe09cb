"""What Snakemake's SLURM plugin lacks, made up for from outside: the one function replaced in it."""

import snakemake_executor_plugin_slurm as plugin


def outlive_a_silent_controller() -> None:
    """Let the plugin (2.8) keep what it knows of the controller's memory of finished jobs.

    At each look at its jobs it asks for MinJobAge. It takes a controller that does not answer for
    one without such a memory, and turns to sacct; where that has nothing to say either, it forgets
    its jobs and waits for ever. It has no setting for this, and Snakemake holds its executor's
    class by the time that rules are read, so that no subclass can take its place. What was known
    when the jobs were about to be submitted stays known.
    """
    known_s = plugin.get_min_job_age()
    ask = plugin.get_min_job_age
    plugin.get_min_job_age = lambda: ask() or known_s
