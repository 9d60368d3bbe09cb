"""`python -m pipeline_lib`."""

from pipeline_lib.cli import main

main()
