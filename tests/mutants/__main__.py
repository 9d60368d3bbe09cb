"""`python -m tests.mutants [PART ...]`: which of the faults in faults.toml the tests notice.

Each fault is put into a copy of the working tree, alone, and the tests that it names run there.
With PARTs, only faults that have one of them in their file or description.
"""

import argparse
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from subprocess import Popen

from tests.mutants.faults import ROOT, Fault, ListError, problems, read_faults

LIMIT_S = 900.0  # for the tests of a fault; one that makes them hang is noticed
TEST_LIMIT_S = 400  # for each of them: a busy machine is no reason to call a fault noticed
PASSED, FAILED = 0, 1  # pytest's exit codes; any other says that tests could not be run
running: set[Popen[str]] = set()


def copy_tree(target: Path) -> Path:
    """Copy the files of the tree that git does not ignore, with what tests look for beside it.

    The files are those of the working tree; what lies beside the repository is linked.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    tree = target / "tree"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").is_dir():
        (target / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def run_tests(tree: Path, tests: Sequence[str], limit_s: float, *options: str) -> tuple[int, str]:
    """Return pytest's exit code in `tree`, and its output; FAILED if it exceeds `limit_s`."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [f"--timeout={TEST_LIMIT_S}", *options, *tests]
    # the path is also for what tests start
    environ = {**os.environ, "PYTHONPATH": str(tree), "TESTS_DEADLINE_S": "60"}
    process = Popen(
        command,
        cwd=tree,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )
    running.add(process)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return FAILED, f"no answer within {limit_s:.0f} s"
    finally:
        kill(process)
        running.discard(process)
    return process.returncode, output


def kill(process: Popen[str]) -> None:
    """Kill what is left of the process and of those that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def is_noticed(fault: Fault, trees: "queue.Queue[Path]") -> bool:
    """Return whether the tests of `fault` fail in one of the `trees` with it.

    Raises ListError if they do not run.
    """
    tree = trees.get()
    path = tree / fault.file
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(whole.replace(fault.old, fault.new), encoding="utf-8")
        code, output = run_tests(tree, fault.tests, LIMIT_S, "-x")
    finally:
        path.write_text(whole, encoding="utf-8")
        trees.put(tree)
    if code not in (PASSED, FAILED):
        raise ListError(f"{fault.name}: pytest ended with {code}\n{output}")
    return code == FAILED


def judged(faults: Sequence[Fault], at_once: int) -> Iterator[tuple[Fault, bool]]:
    """Yield each fault and whether it was noticed.

    Raises ListError if tests fail without any fault.
    """
    trees: queue.Queue[Path] = queue.Queue()
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(at_once) as pool,
    ):
        for number in range(at_once):
            trees.put(copy_tree(Path(folder, str(number))))
        tests = sorted({test for fault in faults for test in fault.tests})
        tree = trees.get()
        print(f"running {len(tests)} tests without a fault", flush=True)
        code, output = run_tests(tree, tests, len(faults) * LIMIT_S)
        trees.put(tree)
        if code != PASSED:
            raise ListError(f"tests fail without a fault, or do not run:\n{output}")
        flights = {pool.submit(is_noticed, fault, trees): fault for fault in faults}
        try:
            for flight in as_completed(flights):
                yield flights[flight], flight.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in [*running]:
                kill(process)


def main() -> int:
    """Print what became of each fault, and the score; return 1 if a fault survived."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help="a part of the file or description of a fault"
    )
    parser.add_argument(
        "-n", type=int, default=2, metavar="N", help="faults at a time (default: 2)"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start_s = time.monotonic()
    faults = [
        fault
        for fault in read_faults()
        if not arguments.parts or any(part in fault.name for part in arguments.parts)
    ]
    if not faults or (found := problems(faults)):
        raise ListError("\n".join(found) if faults else "no fault has such a part")
    told = [fault for fault in faults if fault.equivalent]
    tried = [fault for fault in faults if not fault.equivalent]
    survived = 0
    for fault, noticed in judged(tried, arguments.n):
        survived += not noticed
        print(f"{'noticed   ' if noticed else 'SURVIVED  '}  {fault.name}", flush=True)
    for fault in told:
        print(f"equivalent  {fault.name}: {fault.equivalent}")
    score = (
        f"{len(tried) - survived} of {len(tried)} faults noticed "
        f"({1 - survived / max(1, len(tried)):.1%})"
    )
    print(f"{score}, {len(told)} equivalent, in {(time.monotonic() - start_s) / 60:.1f} min")
    return 1 if survived else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ListError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
