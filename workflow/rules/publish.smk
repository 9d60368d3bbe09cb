# From trained weights to a model folder, its scores and the page that shows them. The evaluation of the base model is a
# job of evaluate_stage by itself, which reads no trained weights.


use rule shard_stage as merge_stage with:
    output:
        f"{STORE.root}/merge/{{digest}}.ok",
    log:
        "logs/merge/{digest}.log",
    benchmark:
        "logs/benchmark/merge/{digest}.tsv"
    priority: 1
    threads: threads_of("merge")
    resources:
        **stage_job("merge"),
    params:
        stage="merge",
        gpus=gpus_of("merge"),


use rule merge_stage as export_stage with:
    output:
        f"{STORE.root}/export/{{digest}}.ok",
    log:
        "logs/export/{digest}.log",
    benchmark:
        "logs/benchmark/export/{digest}.tsv"
    priority: 0
    resources:
        **stage_job("export"),
    params:
        stage="export",
        gpus=gpus_of("merge"),


use rule shard_stage as evaluate_stage with:
    output:
        f"{STORE.root}/evaluate/{{digest}}.ok",
    log:
        "logs/evaluate/{digest}.log",
    benchmark:
        "logs/benchmark/evaluate/{digest}.tsv"
    threads: threads_of("load")
    resources:
        **stage_job("evaluate"),
    params:
        stage="evaluate",
        gpus=gpus_of("load"),


use rule shard_stage as overlap_stage with:
    output:
        f"{STORE.root}/overlap/{{digest}}.ok",
    log:
        "logs/overlap/{digest}.log",
    benchmark:
        "logs/benchmark/overlap/{digest}.tsv"
    resources:
        **stage_job("overlap"),
    params:
        stage="overlap",


use rule shard_stage as benchmark_stage with:
    output:
        f"{STORE.root}/benchmark/{{digest}}.ok",
    log:
        "logs/benchmark/{digest}.log",
    benchmark:
        "logs/benchmark/benchmark/{digest}.tsv"
    threads: threads_of("load")
    resources:
        **stage_job("benchmark"),
    params:
        stage="benchmark",
        gpus=gpus_of("load"),


# It runs where snakemake runs: nodes often lack the network.
use rule shard_stage as push_stage with:
    output:
        f"{STORE.root}/push/{{digest}}.ok",
    log:
        "logs/push/{digest}.log",
    benchmark:
        "logs/benchmark/push/{digest}.tsv"
    localrule: True
    resources:
        **stage_job("push"),
    params:
        stage="push",


rule report_stage:
    input:
        ancient(stage_inputs),
    output:
        pointer=f"{STORE.root}/report/{{digest}}.ok",
        page=report(
            f"{STORE.root}/report/{{digest}}.html",
            caption="../report/experiment.rst",
            category="Experiments",
            labels=report_labels,
        ),
    log:
        "logs/report/{digest}.log",
    benchmark:
        "logs/benchmark/report/{digest}.tsv"
    localrule: not SITE.short_stages_as_jobs
    resources:
        **stage_job("report"),
    params:
        title=stage_title,
        spec=stage_spec,
        page=f"{STORE.root}/report/{{digest}}/report.html",
    message:
        "{params.title}"
    shell:
        "(python -m pipeline_lib report --spec {params.spec:q} --after {input:q}"
        " && cp {params.page:q} {output.page:q}.new && mv {output.page:q}.new {output.page:q}) 2>&1 | log_to {log:q}"
