# Successive halving: every training of a sweep to a step, and from there only the best.
from pipeline_lib.config.halving import DECISIONS, RUNGS


# The training rule with another end: what it came to at the rung. Its checkpoint is in the folder of the whole run.
rule rung_stage:
    input:
        ancient(inputs_to_rung),
        plan=ancient(plan_of_training),
    output:
        f"{STORE.root}/{RUNGS}/{{digest}}.json",
    log:
        "logs/rung/{digest}.log",
    benchmark:
        "logs/benchmark/rung/{digest}.tsv"
    priority: 1
    retries: 0
    threads: training_threads
    resources:
        **training_job("rung_stage"),
    params:
        title=stage_title,
        spec=stage_spec,
        requeue=requeue_flag,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib train --spec {params.spec:q} --plan {input.plan:q} --reached {output:q}"
        " {params.requeue} --after {input:q} 2>&1 | log_to {log:q}"


checkpoint decide:
    input:
        needed_for_decision,
    output:
        f"{STORE.root}/{DECISIONS}/{{digest}}.json",
    log:
        "logs/decide/{digest}.log",
    localrule: True
    params:
        frozen=os.environ[FROZEN_VARIABLE],
    message:
        "which trainings of the sweep go on"
    shell:
        "python -m pipeline_lib decide --frozen {params.frozen:q} --rung {wildcards.digest} --after {input:q}"
        " 2>&1 | log_to {log:q}"
