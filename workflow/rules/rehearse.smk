# Two real steps of the real run on the real nodes, through save, stop, resume, merge and load: small before large.
from pipeline_lib.workflow.rehearsal import needed_for_findings, needed_for_report


rule rehearsal_stage:
    input:
        inputs_of_all(needed_for_findings),
    output:
        f"{STORE.root}/rehearse/{{digest}}.txt",
    log:
        "logs/rehearse/{digest}.log",
    threads: threads_of("load")
    resources:
        **job_of("rehearsal_stage", "load"),
    params:
        frozen=os.environ[FROZEN_VARIABLE],
    message:
        "the merged model of the rehearsal is loaded, and the cost of the whole run worked out"
    shell:
        "python -m pipeline_lib rehearse --frozen {params.frozen:q} --out {output:q} --after {input:q}"
        " 2>&1 | log_to {log:q}"


rule rehearse:
    input:
        inputs_of_all(needed_for_report),
    log:
        "logs/rehearse.log",
    localrule: True
    params:
        frozen=os.environ[FROZEN_VARIABLE],
    message:
        "what the rehearsal found"
    shell:
        "python -m pipeline_lib rehearse --frozen {params.frozen:q} 2>&1 | log_to {log:q}"
