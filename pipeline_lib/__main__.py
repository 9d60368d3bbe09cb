"""`python -m pipeline_lib`."""

from pipeline_lib.cli.main import main

main()
