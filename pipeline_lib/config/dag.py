"""Answers Snakemake's questions about an experiment: what to make, from what, under which title.

The main process compiles the YAML and freezes the result; jobs that parse the Snakefile again (on cluster
nodes) read the frozen one, so that editing the YAML meanwhile changes nothing that was submitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.base.errors import ConfigError, IntegrityError
from pipeline_lib.base.fsio import canonical_json, read_json, replace_link, sha256_text, write_json
from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.base.spec import DIGEST_CHARS, Spec
from pipeline_lib.base.store import Store
from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.config.schema import Config

FROZEN_VARIABLE = "PIPELINE_FROZEN_EXPERIMENT"
DEFAULT_CONFIG = Path("config/config.yaml")
RESULTS = Path("results")


@dataclass(frozen=True)
class Dag:
    """An experiment in a store, as Snakemake sees it."""

    experiment: Experiment
    store: Store

    @staticmethod
    def compile(configfiles: list[str], overrides: Mapping[str, object], store: Store) -> "Dag":
        """Compile the one config file and freeze its specs. Raises ConfigError."""
        if overrides:
            keys = ", ".join(sorted(overrides))
            raise ConfigError("--config", [f"{keys}: not read; edit the YAML or give another with --configfile"])
        if len(configfiles) > 1:
            raise ConfigError("--configfile", [f"one file is read, not {len(configfiles)}: {', '.join(configfiles)}"])
        path = Path(configfiles[0]) if configfiles else DEFAULT_CONFIG
        dag = Dag(open_experiment(path, store), store)
        store.write_specs(dag.experiment.specs.values())
        store.drop_dangling_pointers(dag.experiment.specs.values())
        return dag

    def freeze(self) -> Path:
        """Write the experiment under the hash of its content; returns the path for `FROZEN_VARIABLE`."""
        parts = {part: spec.digest for part, spec in self.experiment.specs.items()}
        frozen = {"config": self.experiment.config.model_dump(mode="json"), "parts": parts}
        path = self.store.root / "experiments" / f"{sha256_text(canonical_json(frozen))[:DIGEST_CHARS]}.json"
        if not path.exists():
            write_json(path, frozen)
        return path.resolve()

    @staticmethod
    def thaw(path: Path, store: Store) -> "Dag":
        """The experiment that `freeze` wrote."""
        try:
            frozen = read_json(path)
            config = Config.model_validate_json(canonical_json(frozen["config"]))
            parts = {part: store.read_spec(store.spec_path(digest)) for part, digest in frozen["parts"].items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise IntegrityError(f"{path}: cannot read the frozen experiment ({error}); run snakemake anew") from error
        return Dag(Experiment(config, parts), store)

    def pointer(self, part: str) -> str:
        """The file that says that `part` of the experiment is done."""
        return str(self.store.pointer(self.experiment.ref(part)))

    def pointers_read_by(self, digest: str) -> list[str]:
        """The pointers of everything that the stage instance `digest` reads."""
        return [str(self.store.pointer(ref)) for _, ref in sorted(self._spec(digest).inputs.items())]

    def title(self, digest: str) -> str:
        """One line about a stage instance, for the job list of a dry run."""
        config, stage = self.experiment.config, self._spec(digest).stage
        where = f"{config.cluster.ranks} {config.cluster.device} ranks"
        details = {
            "download": ", ".join(part for part, spec in self.experiment.specs.items() if spec.digest == digest),
            "tokenize": f"{len(config.data.train)} sources, up to {config.tokenize.max_tokens} tokens a sample",
            "shard": f"blocks of {config.shard.block_tokens} tokens in {config.shard.shards} files",
            "plan": where,
            "train": f"{config.train.method} fine-tuning by {config.train.strategy} on {where}",
            "merge": "model folder in Hugging Face format, checked against the trained model",
            "evaluate": "base against tuned on held-out answers",
            "report": "one page with everything",
        }
        return f"{self.experiment.name}: {stage} ({details[stage]})"

    def link_results(self, results: Path = RESULTS) -> dict[str, Path]:
        """Point RESULTS/NAME/{report.html,model} at what is finished; returns those links.

        A file or folder of the user's own under such a name is left alone.
        """
        links = {}
        for part, name, inside in (("report", "report.html", "report.html"), ("merge", "model", "")):
            link, sealed = results / self.experiment.name / name, self.store.sealed(self.experiment.ref(part))
            if (sealed / MANIFEST_NAME).exists() and (link.is_symlink() or not link.exists()):
                replace_link(link, sealed / inside)
                links[link.stem] = link
        return links

    def _spec(self, digest: str) -> Spec:
        """The spec with that digest. Only this experiment's, since its plan places them."""
        spec = self.experiment.by_digest(digest)
        if spec is None:
            raise IntegrityError(f"{digest}: no stage of experiment {self.experiment.name!r}; ask for its own targets")
        return spec
