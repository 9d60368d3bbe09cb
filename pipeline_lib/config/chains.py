"""Find the experiments that `model: {source: experiment}` names, and put their configs there.

A config then holds those of all experiments before it, so that compiling it stays a function of it
and of the hashes of its files.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline_lib.config.schema import Config, ExperimentModel
from pipeline_lib.config.strict_yaml import Keys
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import did_you_mean

Problem = tuple[Keys, str]
NAME, CONFIG = ("model", "name"), ("model", "config")
_SHOWN_NAMES = 5


@dataclass
class Candidate:
    """An experiment of a file that others may go on from.

    `name` is its name in the file and `tag` what its sweep changes; both have no overrides, which
    its config's name has. `config` is None if it breaks the schema. `problems` are those of the
    reference in its `model`.
    """

    name: str
    tag: str
    config: Config | None
    problems: list[Problem] = field(default_factory=list)

    @property
    def full_name(self) -> str:
        """The name by which others refer to it."""
        return f"{self.name}-{self.tag}" if self.tag else self.name


@dataclass(frozen=True)
class OtherFile:
    """The experiments of another config file; `is_halved` if some of them are stopped early."""

    candidates: Sequence[Candidate]
    is_halved: bool


OpenFile = Callable[[Path], OtherFile]


def link_parents(candidates: Sequence[Candidate], open_file: OpenFile) -> None:
    """Give each of a file's `candidates` with an ExperimentModel the config that it means.

    One whose parent is not found gets a problem, and keeps none; those after it too, without a
    problem of their own. `open_file` reads another config file; it raises ConfigError.
    """
    _Linking(candidates, open_file).run()


class _Linking:
    def __init__(self, candidates: Sequence[Candidate], open_file: OpenFile) -> None:
        self._candidates = candidates
        self._open_file = open_file
        self._files: dict[Path, OtherFile | ConfigError] = {}
        self._done: set[int] = set()

    def run(self) -> None:
        for candidate in self._candidates:
            self._link(candidate, [])

    def _link(self, candidate: Candidate, children: list[Candidate]) -> None:
        """Link `candidate`, of which `children` are made, the next one last."""
        if id(candidate) in self._done or candidate.config is None:
            return
        model = candidate.config.model
        if isinstance(model, ExperimentModel) and not candidate.problems:
            found = self._parent(candidate, model, [*children, candidate])
            if found is not None and found.config is not None and not found.problems:
                linked = model.model_copy(
                    update={"name": found.config.experiment, "parent": found.config}
                )
                candidate.config = candidate.config.model_copy(update={"model": linked})
        self._done.add(id(candidate))

    def _parent(
        self, candidate: Candidate, model: ExperimentModel, children: list[Candidate]
    ) -> Candidate | None:
        """Return the linked parent; None, with a problem in `candidate`, if there is none."""
        if model.config is not None:
            return self._elsewhere(candidate, model.config, model.name)
        name = model.name or ""
        found = _chosen(name, candidate.tag, self._candidates)
        if isinstance(found, str):
            candidate.problems.append((NAME, found))
            return None
        if any(found is child for child in children):
            first = next(place for place, child in enumerate(children) if child is found)
            names = [child.full_name for child in children[first:]]
            text = f"a cycle, {' from '.join([*names, found.full_name])}: each goes on from another"
            remedy = "let one of them begin at a published model"
            candidate.problems.append((NAME, f"{text}; {remedy}"))
            return None
        self._link(found, children)
        return found

    def _elsewhere(self, candidate: Candidate, path: str, name: str | None) -> Candidate | None:
        file = self._opened(Path(path))
        if isinstance(file, ConfigError):
            for problem in file.problems:
                candidate.problems.append((CONFIG, f"{file.source}: {problem}"))
            return None
        if file.is_halved:
            text = (
                f"{path}: its sweep has `halving`, which stops some of its experiments before they "
                "give a model; name a file that trains the best of them alone"
            )
            candidate.problems.append((CONFIG, text))
            return None
        if name is None and len(file.candidates) == 1:
            return file.candidates[0]
        if name is None:
            several = _some_of([one.full_name for one in file.candidates])
            text = f"{path} has {len(file.candidates)} experiments: add `name`, one of {several}"
            candidate.problems.append((CONFIG, text))
            return None
        found = _chosen(name, candidate.tag, file.candidates)
        if isinstance(found, str):
            candidate.problems.append((NAME, f"{found} (in {path})"))
            return None
        return found

    def _opened(self, path: Path) -> OtherFile | ConfigError:
        if path not in self._files:
            try:
                self._files[path] = self._open_file(path)
            except ConfigError as error:
                self._files[path] = error
        return self._files[path]


def _chosen(name: str, tag: str, candidates: Sequence[Candidate]) -> Candidate | str:
    """Return the candidate that `name` means to an experiment with `tag`; else what is wrong.

    Of a sweep, `name` alone means the experiment with the same values.
    """
    for one in candidates:
        if one.full_name == name:
            return one
    swept = [one for one in candidates if one.name == name]
    for one in swept:
        if one.tag == tag:
            return one
    if swept:
        some = _some_of([one.full_name for one in swept])
        return f"{name!r} is a sweep of {len(swept)} experiments: name one, {some}"
    names = [one.full_name for one in candidates]
    return (
        f"no experiment is called {name!r}{did_you_mean(name, names)}; there "
        f"{'are' if len(names) > 1 else 'is'} {_some_of(names)}; for one of another file add "
        "`config: FILE`, and for a model folder write {source: local, path: FOLDER}"
    )


def _some_of(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return f"{shown}, ..." if len(names) > _SHOWN_NAMES else shown
