# Fine-tunes a Qwen3 model: download -> tokenize -> shard -> plan -> train -> merge -> evaluate -> report.
#
#   snakemake                                   the experiment of config/config.yaml, on this machine
#   snakemake --configfile my.yaml
#   snakemake --profile slurm                   its stages as jobs of a SLURM cluster
#   snakemake plan                              what it will take, before anything is spent
#   snakemake train                             up to the end of a stage: download, tokenize, shard, train, merge, ...
#   snakemake rehearse                          two steps of it through save, resume, merge and load, and the cost
#   snakemake -n                                what would run
#
# The rules know files; what to compute stands in the specs that the config compiles to (docs: README.md).
from snakemake.utils import min_version

min_version("9.19.0")


container: "docker://python:3.11-slim"  # read only with --sdm apptainer; names where the rules can run


include: "workflow/rules/common.smk"
include: "workflow/rules/sweep.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/halving.smk"
include: "workflow/rules/publish.smk"
include: "workflow/rules/rehearse.smk"
include: "workflow/rules/ending.smk"


from pipeline_lib.core.files import take_out_of_future
from pipeline_lib.report.outcomes import BEGUN, LOGS, note_begin


localrules:
    all,
    plan,
    rehearse,
    decide,
    download_stage,


rule all:
    default_target: True
    input:
        products,


# The others under their names too, besides `plan`, which also shows what it makes.
for stage in [name for name in STAGES if name != "plan"]:

    rule:
        name:
            stage
        input:
            results_of(stage),


rule plan:
    input:
        results_of("plan"),
    log:
        "logs/plan.log",
    params:
        # A stage that ran here just now has shown its plan; one that was a job has shown it in the job's log.
        unless_shown=f'[ "$pointer" -nt {LOGS / BEGUN} ] ||' if plans_here() else "",
    message:
        "what the experiments will take"
    shell:
        'for pointer in {input:q}; do {params.unless_shown} cat "${{pointer%.ok}}/plan.txt"; done | log_to {log:q}'


onstart:
    take_out_of_future(EXPERIMENT.outputs())
    note_begin()
    INVOCATION.note_wanted(job.rule.name for job in workflow.dag.needrun_jobs())
    if workflow.local_exec:
        STAGES_STOPPED.begin()


onsuccess:
    tell_ending()


onerror:
    tell_ending()
    explain()
