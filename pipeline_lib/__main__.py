"""`python -m pipeline_lib`."""

import sys

try:
    from pipeline_lib.cli.main import main
except ModuleNotFoundError as error:
    if str(error.name).partition(".")[0] == "pipeline_lib":
        raise
    sys.exit(
        f"error: {sys.executable} lacks the library {error.name}; type `. .venv/bin/activate` in the "
        "project's folder, or `make install` there first"
    )

if __name__ == "__main__":
    main()
