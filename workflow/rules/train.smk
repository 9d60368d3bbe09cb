# What the training will take, and the training itself.


use rule shard_stage as plan_stage with:
    output:
        f"{STORE.root}/plan/{{digest}}.ok",
    log:
        "logs/plan/{digest}.log",
    benchmark:
        "logs/benchmark/plan/{digest}.tsv"
    localrule: not SITE.short_stages_as_jobs  # it takes seconds, and a job may wait for hours
    resources:
        **stage_job("plan"),
    params:
        stage="plan",


# The plan places the run but is no part of what is computed: `ancient`, so that another cluster section
# makes another plan and never trains anew. Checkpoints are working state, not an output: Snakemake deletes outputs.
# Retries are its own: only it knows what was saved, and whether the job is queued again already. What all
# attempts of a job said is in SLURM's log, since Snakemake removes its own when a job starts.
rule train_stage:
    input:
        ancient(train_inputs),
        plan=ancient(plan_of_training),
    output:
        f"{STORE.root}/train/{{digest}}.ok",
    log:
        "logs/train/{digest}.log",
    benchmark:
        "logs/benchmark/train/{digest}.tsv"
    priority: 1  # as the merge: they go before the evaluation of the base model, for which only the report waits
    retries: 0
    threads: training_threads
    resources:
        **training_job("train_stage"),
    params:
        title=stage_title,
        spec=stage_spec,
        requeue=requeue_flag,
        following=following,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib train --spec {params.spec:q} --plan {input.plan:q} {params.requeue}"
        " {params.following:q}"
        " --after {input:q} 2>&1 | log_to {log:q}"
