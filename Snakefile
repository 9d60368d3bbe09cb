# What `snakemake` finds first in this folder. The rules are in workflow/, where Snakemake's catalog looks for them.
include: "workflow/Snakefile"
