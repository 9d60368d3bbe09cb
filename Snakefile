# Fine-tunes a Qwen3 model: download -> tokenize -> shard -> plan -> train -> merge -> evaluate -> report.
#
#   snakemake                                   the experiment of config/config.yaml, on this machine
#   snakemake --configfile config/recipes/X.yaml
#   snakemake --profile slurm                   its stages as jobs of a SLURM cluster
#   snakemake plan                              what it will take, before anything is spent
#   snakemake -n                                what would run
#
# The rules know files; what to compute stands in the specs that the config compiles to (docs: README.md).
from snakemake.utils import min_version

min_version("9.19.0")


container: "docker://python:3.11-slim"  # read only with --sdm apptainer; names where the rules can run


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/publish.smk"


localrules:
    all,
    plan,
    download_stage,


rule all:
    default_target: True
    input:
        EXPERIMENT.pointer("report"),


rule plan:
    input:
        EXPERIMENT.pointer("plan"),
    log:
        "logs/plan.log",
    message:
        "what this experiment will take"
    shell:
        'pointer={input:q}; cat "${{pointer%.ok}}/plan.txt" | tee -i {log:q}'
