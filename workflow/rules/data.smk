# From sources to packed blocks.
#
# Pointers are `ancient` as inputs: their path is the key of their content, so that no time of one makes a finished stage
# outdated. Snakemake still refuses an output that is older than an input, so each stage is given its inputs (`--after`).


rule download_stage:
    input:
        ancient(stage_inputs),
    output:
        f"{STORE.root}/download/{{digest}}.ok",
    log:
        "logs/download/{digest}.log",
    benchmark:
        "logs/benchmark/download/{digest}.tsv"
    localrule: True
    params:
        title=stage_title,
        spec=stage_spec,
        where=stage_where,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib download --spec {params.spec:q} {params.where:q} --after {input:q} 2>&1 | log_to {log:q}"


rule tokenize_stage:
    input:
        ancient(stage_inputs),
    output:
        f"{STORE.root}/tokenize/{{digest}}.ok",
    log:
        "logs/tokenize/{digest}.log",
    benchmark:
        "logs/benchmark/tokenize/{digest}.tsv"
    threads: tokenize_threads
    resources:
        **stage_job("tokenize"),
    params:
        title=stage_title,
        spec=stage_spec,
        where=stage_where,
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib tokenize --spec {params.spec:q} {params.where:q} --workers {threads} --after {input:q}"
        " 2>&1 | log_to {log:q}"


# Also the base of plan_stage, merge_stage and evaluate_stage, which differ in what they are and ask for.
rule shard_stage:
    input:
        ancient(stage_inputs),
    output:
        f"{STORE.root}/shard/{{digest}}.ok",
    log:
        "logs/shard/{digest}.log",
    benchmark:
        "logs/benchmark/shard/{digest}.tsv"
    resources:
        **stage_job("shard"),
    params:
        title=stage_title,
        spec=stage_spec,
        where=stage_where,
        stage="shard",
        gpus="",
    message:
        "{params.title}"
    shell:
        "python -m pipeline_lib {params.stage} --spec {params.spec:q} {params.where:q} {params.gpus}"
        " --after {input:q} 2>&1 | log_to {log:q}"
