# What the training will take, and the training itself.


rule plan_stage:
    input:
        stage_inputs,
    output:
        f"{STORE.root}/plan/{{digest}}.ok",
    log:
        "logs/plan/{digest}.log",
    benchmark:
        "logs/benchmark/plan/{digest}.tsv"
    resources:
        mem_mb=1000,
        runtime=10,
    params:
        title=stage_title,
        spec=stage_spec,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib plan --spec {params.spec:q} 2>&1 | tee -i {log:q}"


# With the launcher `srun` the job has a task for each rank, and the stage runs in its batch step, where it starts
# them; the plugin's own step around it (any job without `mpi`) would hold their place.
TASKS = CLUSTER.ranks if CLUSTER.launcher == "srun" and CLUSTER.ranks > 1 else None


# The plan places the run but is no part of what is computed: `ancient`, so that another cluster section
# makes another plan and never trains anew. Checkpoints are working state, not an output: Snakemake deletes outputs.
rule train_stage:
    input:
        train_inputs,
        plan=ancient(EXPERIMENT.pointer("plan")),
    output:
        f"{STORE.root}/train/{{digest}}.ok",
    log:
        "logs/train/{digest}.log",
    benchmark:
        "logs/benchmark/train/{digest}.tsv"
    threads: CLUSTER.ranks * CLUSTER.cpus_per_rank
    resources:
        mem_mb=CLUSTER.memory_gb * 1000,
        runtime=CLUSTER.runtime_minutes,
        gres=f"gpu:{CLUSTER.gpus_per_node}" if CLUSTER.gpus_per_node else None,
        mpi="srun" if TASKS else None,
        tasks_per_node=TASKS,
        cpus_per_task=CLUSTER.cpus_per_rank if TASKS else None,
    params:
        title=stage_title,
        spec=stage_spec,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib train --spec {params.spec:q} --plan {input.plan:q}"
        " 2>&1 | tee -i {log:q}"
