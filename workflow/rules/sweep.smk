# Of a sweep: which trainings go on.
from pipeline_lib.config.halving import reached_path, read_decision


def decision_of(rung):
    """Snakemake makes it first, and asks again."""
    path = Path(checkpoints.decide.get(digest=rung.digest).output[0])
    try:
        return read_decision(path)
    except PipelineError as error:
        exit_with(error)


def needed_for_decision(wildcards):
    """What those came to that the rung before let go on; and that decision, so that another one is followed."""
    begin()
    rung, before = EXPERIMENT.rung(wildcards.digest)
    going = decision_of(before).survivors if before else rung.trainings
    reached = [str(reached_path(STORE, rung.trainings[one].digest)) for one in going]
    return reached + (
        [checkpoints.decide.get(digest=before.digest).output[0]] if before else []
    )


def survivors():
    """The trainings that go to their end: with halving those that no rung stopped, else None, which stands for all."""
    going = None
    for rung in EXPERIMENT.rungs:
        decision = decision_of(rung)
        going = decision.survivors
        if decision.next_step is None:
            break
    return going


def products(wildcards):
    """Reports and models of all experiments, or with halving of the survivors."""
    begin()
    return EXPERIMENT.products(survivors())


def results_of(stage):
    """What `stage` makes for all experiments, or with halving, from the training on, for the survivors."""
    is_of_all = stage not in onwards("train")

    def results(wildcards):
        begin()
        return EXPERIMENT.pointers(stage, None if is_of_all else survivors())

    return results
