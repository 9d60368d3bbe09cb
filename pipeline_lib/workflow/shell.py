"""What the shell of each rule runs first."""

import shlex
from pathlib import Path

from pipeline_lib.core.signals import STOP_SIGNALS
from pipeline_lib.slurm.site import Site

_STOPS = " ".join(number.name.removeprefix("SIG") for number in STOP_SIGNALS)


def shell_prefix(library: Path, python: str, site: Site | None) -> str:
    """Return the lines before the command of a rule, as Snakemake formats them.

    `python` in the rules is that of `python`, which runs Snakemake, and the library is the one in
    the folder `library`, also where another is installed. `site` is that of a job of a cluster,
    which begins with what its site wants; None on this machine.
    """
    lines = _of_rules(library, python)
    if site is not None:
        lines = _variables(library, python, site) + site.shell_lines() + lines
    return lines.replace("{", "{{").replace("}", "}}")


def _of_rules(library: Path, python: str) -> str:
    """Return what every rule needs, on this machine or in a job.

    A stage that fails before `| log_to` fails its rule. A signal to all processes ends neither the
    shell, which waits for the stage, nor what writes its log, also where the terminal is closed, so
    that a training can say that it saves. Stages keep what they compile of Python's modules, which
    containers like to forbid: it costs seconds each time.
    """
    return (
        f"unset PYTHONDONTWRITEBYTECODE; export PATH={shlex.quote(str(Path(python).parent))}:$PATH"
        f" PYTHONPATH={shlex.quote(str(library))}:$PYTHONPATH; set -euo pipefail; trap : {_STOPS}; "
        f"log_to() {{ trap '' {_STOPS}; exec tee -p \"$1\"; }}; "
    )


def _variables(library: Path, python: str, site: Site) -> str:
    """Return the line that sets the site's variables, which a program prints: they may be secret."""
    if not site.variables():
        return ""
    command = f"{shlex.quote(python)} -m pipeline_lib site"
    return f'eval "$(PYTHONPATH={shlex.quote(str(library))} {command})"\n'
