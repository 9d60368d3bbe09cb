"""The rules that keep the package readable, held for every module, now and in future."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline_lib.config.stages import STAGES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline_lib"

# From the bottom to the top; a module imports from its own room or from layers below. Rooms of one
# layer are siblings, and siblings never import each other.
LAYERS = (
    ("core",),
    ("hub", "records"),
    ("config",),
    ("arch", "lineage", "tracking"),
    ("data",),
    ("plan", "model"),
    ("slurm",),
    ("hosts",),
    ("launch",),
    ("train", "doctor"),
    ("calibrate", "report", "status"),
    ("evaluate", "export", "compare", "upkeep"),
    ("workflow", "certify"),
    ("cli",),
    ("__main__",),
)
TORCH_FREE = (
    "core",
    "hub",
    "records",
    "config",
    "arch",
    "lineage",
    "tracking",
    "data",
    "plan",
    "slurm",
    "hosts",
    "launch.agent",
    "launch.allocation",
    "status",
    "report",
    "compare",
    "upkeep",
    "workflow.exports",
    "workflow.findings",
    "workflow.invocation",
    "workflow.requests",
    "workflow.rungs",
)
HEAVY = ("torch", "transformers", "numpy", "pandas", "datasets", "bokeh")
AT_THE_BOUNDARY = ("cli", "__main__")
MAX_LINES = 700


def name_of(path: Path) -> str:
    """The name of a module in the package: `data.chat`; of the package itself: empty text."""
    return (
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        .removesuffix("__init__")
        .rstrip(".")
    )


MODULES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(PACKAGE.rglob("*.py"))
}


@cache
def imported_names(module: str) -> list[str]:
    """Full names of all that `module` imports anywhere, also within functions."""
    found = []
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@cache
def imported_modules(module: str) -> set[str]:
    """Modules of the package that `module` imports."""
    found: set[str] = set()
    for name in imported_names(module):
        if name.startswith("pipeline_lib."):
            inner = name.removeprefix("pipeline_lib.")
            found.add(inner if inner in MODULES else inner.rpartition(".")[0])
    return found - {module}


def room_of(module: str) -> str:
    """The folder of `module`, or itself if it lies in none."""
    return module.partition(".")[0]


def layer_of(module: str) -> int:
    """Rank of the layer of `module`."""
    for rank, layer in enumerate(LAYERS):
        if room_of(module) in layer:
            return rank
    raise AssertionError(f"{module} has no place in LAYERS: give its folder one")


def is_package(module: str) -> bool:
    return (PACKAGE / Path(*module.split("."))).is_dir()


def packages_around(module: str) -> set[str]:
    return {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}


@cache
def reachable(module: str, left_out: frozenset[str] = frozenset()) -> set[str]:
    """`module` and all its imports, direct or not; an import runs the packages around it too."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current not in seen | left_out:
            seen.add(current)
            waiting += imported_modules(current) | packages_around(current)
    return seen


def stages() -> set[str]:
    """Modules that are a stage: they define `run(job: Job)`."""
    return {
        module
        for module, tree in MODULES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name == "run"
        and [ast.unparse(argument.annotation or ast.Constant(None)) for argument in node.args.args]
        == ["Job"]
    }


def test_imports_are_absolute() -> None:
    relative = [
        module
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_imports_go_one_way() -> None:
    wrong = []
    for module in MODULES:
        for imported in imported_modules(module) - {""}:
            is_below = layer_of(imported) < layer_of(module)
            if not is_below and room_of(imported) != room_of(module):
                wrong.append(f"{module} imports {imported}")
    assert wrong == []


def test_no_import_goes_in_a_circle() -> None:
    for module in MODULES:
        # importing its parts is no circle, if none imports it
        around = frozenset(packages_around(module))
        assert not imported_modules(module) & around, f"{module} imports its own package"
        for imported in imported_modules(module):
            assert module not in reachable(imported, around) or is_package(module), (
                f"{module} and {imported}"
            )


def test_the_stages_are_those_of_the_table() -> None:
    rows = {row.module for row in STAGES.values() if row.name != "train"}  # of several processes

    assert {f"pipeline_lib.{module}" for module in stages()} == rows


def test_no_stage_imports_another() -> None:
    found = stages()

    for module in found:
        assert not (reachable(module) & found) - {module}


def test_torch_is_not_imported_where_it_is_not_needed() -> None:
    heavy = {module for module in MODULES if imports_torch(module)}
    free = [module for module in MODULES if module.startswith(TORCH_FREE)]

    assert [module for module in free if reachable(module) & heavy] == []


def imports_torch(module: str) -> bool:
    names = {name.partition(".")[0] for name in imported_names(module)}
    return bool(names & {"torch", "peft", "accelerate"})


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages in memory once a fresh interpreter has imported `modules`."""
    code = (
        f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in "
        f"sys.modules}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_torch_is_not_loaded_where_it_is_not_needed() -> None:
    modules = [f"pipeline_lib.{module}" for module in MODULES if module.startswith(TORCH_FREE)]

    assert "torch" not in loaded_by(modules)


def test_compiling_a_config_loads_nothing_heavy() -> None:
    """Every call of snakemake does it."""
    loaded = loaded_by(["pipeline_lib.config.compile", "pipeline_lib.config.dag"])

    assert "pydantic" in loaded
    assert not loaded & set(HEAVY)


def test_looking_whether_a_run_is_possible_loads_nothing_heavy() -> None:
    """Every call of snakemake does it, and a plan is possible without training packages.

    It counts all ways to train as arrays: numpy takes a tenth of a second.
    """
    loaded = loaded_by(["pipeline_lib.plan.preflight"])

    assert "pydantic" in loaded
    assert not loaded & (set(HEAVY) - {"numpy"})


def test_the_command_line_starts_without_anything_heavy() -> None:
    assert not loaded_by(["pipeline_lib.cli.main"]) & set(HEAVY)


def test_a_launcher_starts_without_anything_heavy() -> None:
    """Its ranks load that at once with it; on each node it would take memory for days, too."""
    assert not loaded_by(["pipeline_lib.launch.stage"]) & set(HEAVY)


def test_adapters_load_no_bitsandbytes() -> None:
    """By peft it would be, for layers that no model here has, with inductor, in seconds."""
    loaded = loaded_by(["pipeline_lib.model.lora"])

    assert "peft" in loaded
    assert "bitsandbytes" not in loaded


def test_only_the_command_line_reads_the_environment_or_exits() -> None:
    within = [module for module in MODULES if not module.startswith(AT_THE_BOUNDARY)]

    assert {module: found for module in within if (found := of_the_process(module))} == {}


def of_the_process(module: str) -> set[str]:
    """What `module` uses of those things that are the command line's alone."""
    forbidden = {"exit", "quit", "SystemExit"} | {
        "sys.argv",
        "sys.exit",
        "os.environ",
        "os.environb",
        "os.getenv",
        "os.putenv",
        "os._exit",
    }
    if module == "core.lock":  # a process that lost its lock ends from a thread, whatever it does
        forbidden.remove("os._exit")
    used = set(imported_names(module))
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return used & forbidden


def broad_handlers(module: str) -> list[int]:
    """Lines of `except:`, `except Exception:` and `except BaseException:`, also within a tuple."""
    lines = []
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(
                kind is None or ast.unparse(kind) in {"Exception", "BaseException"}
                for kind in kinds
            ):
                lines.append(node.lineno)
    return lines


def test_unexpected_failures_are_caught_in_one_place() -> None:
    """The command line, and the one library call that raises no more than Exception."""
    found = {module: len(lines) for module in MODULES if (lines := broad_handlers(module))}

    assert found == {"cli.main": 1, "data.encode": 1}


def test_no_assert_and_no_global() -> None:
    found = [
        f"{module}:{node.lineno}"
        for module, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert | ast.Global)
    ]

    assert found == []


def test_a_module_stays_readable() -> None:
    lines = {
        path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")
    }

    assert [path for path, count in lines.items() if count > MAX_LINES] == []


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Name and docstring of every public function, class and method."""
    for node in body:
        if isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        ) and not node.name.startswith("_"):
            yield prefix + node.name, ast.get_docstring(node)
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{node.name}.")


def test_everything_public_says_what_it_promises() -> None:
    silent = []
    for module, tree in MODULES.items():
        if not ast.get_docstring(tree):
            silent.append(module)
        for name, docstring in public_definitions(tree.body):
            if not docstring:
                silent.append(f"{module}.{name}")
    assert silent == []


def functions() -> Iterator[tuple[str, int]]:
    for module, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{module}.{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_functions_fit_a_screen() -> None:
    lengths = sorted(lines for _, lines in functions())

    assert lengths[len(lengths) * 9 // 10] <= 35
    assert [name for name, lines in functions() if lines > 80] == []
