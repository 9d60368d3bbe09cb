"""`python -m tests.golden.make`: writes specs.json and store.tar.xz with the code that runs.

They are what users of that code have: the specs that its configs compile to, a finished experiment
and one that was interrupted. Run it only when users are meant to compute anew;
tests/pipeline/test_golden.py then says what changed.
"""

import json
import os
import shutil
import signal
import tarfile
import tempfile
from pathlib import Path

from tests.golden.configs import CONFIGS, specs_of, write_inputs
from tests.pipeline.conftest import Project, wait_until

HERE = Path(__file__).parent
SPECS = HERE / "specs.json"
ARCHIVE = HERE / "store.tar.xz"
FINISHED, UNFINISHED = "finished.yaml", "unfinished.yaml"
KEPT = ("model", "rows.jsonl", FINISHED, UNFINISHED, "store", "runs")
# in the archive: what the interrupted experiment came to with the code that began it
EXPECTED = "expected.json"
_CONFIG = """\
experiment: {name}
model: {{source: local, path: model}}
data: {{train: [{{source: file, path: rows.jsonl}}], validation_fraction: 0.1}}
tokenize: {{max_tokens: 128}}
shard: {{block_tokens: 128, shards: 2}}
train:
  {{precision: fp32, global_batch_tokens: 256, micro_batch_blocks: 1, epochs: {epochs}, lr: 4.0e-3,
   save_every_steps: 3}}
evaluate: {{generations: 2, max_new_tokens: 8}}
"""


def main() -> None:
    """Write both files beside this one."""
    with tempfile.TemporaryDirectory() as scratch:
        SPECS.write_text(json.dumps(pinned_specs(Path(scratch)), indent=1, sort_keys=True) + "\n")
    with tempfile.TemporaryDirectory() as scratch:
        _archive(Project(Path(scratch)))


def pinned_specs(folder: Path) -> dict[str, object]:
    """What every config compiles to in an empty `folder`, by the config's name."""
    before = Path.cwd()
    write_inputs(folder)
    os.chdir(folder)
    try:
        return {name: specs_of(name, folder) for name in CONFIGS}
    finally:
        os.chdir(before)


def unpack(project: Project) -> dict[str, object]:
    """The archive in `project`, as in a clone after a code update; returns what is expected."""
    with tarfile.open(ARCHIVE) as archive:
        # not known to Python 3.11.0 to 3.11.3
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(project.root)  # noqa: S202 - made here
    return dict(json.loads((project.root / EXPECTED).read_text()))


def finished_state(project: Project) -> dict[str, object]:
    """What the interrupted experiment gave: weights, loss, and the machine of the last bits.

    The machine decides the last bits.
    """
    experiment = project.experiment(project.root / UNFINISHED)
    manifest = project.manifest("train", experiment)
    metrics = json.loads((project.sealed("evaluate", experiment) / "metrics.json").read_text())
    weights = project.manifest("merge", experiment)["files"]
    return {
        "weights": {
            name: entry["sha256"]
            for name, entry in weights.items()
            if name.endswith(".safetensors")
        },
        "loss": metrics["eval"]["tuned"]["loss"],
        "machine": {"cpu": cpu_model(), "torch": manifest["versions"]["torch"]},
    }


def cpu_model() -> str:
    """The processor as the kernel names it: another one may round sums in another order."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        "unknown",
    )


def _archive(project: Project) -> None:
    project.config.write_text(
        "experiment: base\nmodel: {source: tiny, vocab_tokens: 384, hidden_size: 16, layers: 2, "
        "heads: 2}\n"
        "data: {train: [{source: pydoc, max_rows: 60}]}\n"
    )
    project.snakemake("--until", "download_stage")
    base = project.sealed("model")
    shutil.copytree(base, project.root / "model", ignore=shutil.ignore_patterns("manifest.json"))
    rows = [
        {"instruction": f"How much is {n} + {n}?", "output": f"It is {2 * n}, twice {n}."}
        for n in range(90)
    ]
    (project.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.rmtree(project.root / "store")
    for name, epochs in ((FINISHED, 1), (UNFINISHED, 6)):
        text = _CONFIG.format(name=name.removesuffix(".yaml"), epochs=epochs)
        (project.root / name).write_text(text)
    project.snakemake("--configfile", FINISHED)
    _interrupt(project)
    with tempfile.TemporaryDirectory() as copy:
        for name in KEPT:
            source = project.root / name
            if source.is_dir():
                shutil.copytree(source, Path(copy) / name, symlinks=True)
            else:
                shutil.copy2(source, Path(copy) / name)
        project.snakemake("--configfile", UNFINISHED)
        (Path(copy) / EXPECTED).write_text(json.dumps(finished_state(project), indent=1) + "\n")
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            for name in (*KEPT, EXPECTED):
                archive.add(Path(copy) / name, arcname=name)


def _interrupt(project: Project) -> None:
    """Ctrl-C after the first checkpoint: the training saves its step and ends."""
    before = set(project.root.glob("runs/*/checkpoints/step-*"))
    process = project.start("--configfile", UNFINISHED)
    wait_until(
        lambda: bool(set(project.root.glob("runs/*/checkpoints/step-*")) - before),
        process,
        "a checkpoint",
    )
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() != 0, "it was done before it was interrupted: give it more epochs"


if __name__ == "__main__":
    main()
