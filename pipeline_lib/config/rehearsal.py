"""The stage instances of a rehearsal: the training of an experiment up to its first save, then to its second, merged.

`until_step` does not enter a run's digest, so both trainings work in the folder of the real run, which continues from
where they end: nothing is computed twice, and nothing of the experiment gets another digest.
"""

from dataclasses import dataclass
from functools import cached_property

from pipeline_lib.base.spec import Ref, Spec
from pipeline_lib.config.compile import Experiment


@dataclass(frozen=True)
class Rehearsal:
    """Two trainings, until `first_step` and from there until `last_step`, and the merge of the second."""

    first: Spec
    second: Spec
    merge: Spec

    @property
    def specs(self) -> tuple[Spec, ...]:
        """In the order in which they are made."""
        return self.first, self.second, self.merge

    @property
    def first_step(self) -> int:
        """Where the first training saves and ends."""
        return int(self.first.settings["until_step"])

    @property
    def last_step(self) -> int:
        """Where the second training ends."""
        return int(self.second.settings["until_step"])

    def waits_for(self, digest: str) -> list[Ref]:
        """What has to be done before `digest` though it does not read it: the second training resumes."""
        return [self.first.ref] if digest == self.second.digest else []

    def title(self, digest: str) -> str | None:
        """What `digest` does in the rehearsal, if it is of it."""
        return self._titles.get(digest)

    @cached_property
    def _titles(self) -> dict[str, str]:
        return {
            self.first.digest: f"rehearsal: to step {self.first_step}, saved",
            self.second.digest: f"rehearsal: resumed, to step {self.last_step}",
            self.merge.digest: f"rehearsal: model folder of step {self.last_step}",
        }


def rehearsal_of(experiment: Experiment) -> Rehearsal | None:
    """Two steps; with local SGD twice the steps between averagings, since one in between would change the result.

    None if the experiment itself is to stop by then.
    """
    train, merge, settings = experiment.specs["train"], experiment.specs["merge"], experiment.config.train
    steps = (settings.local_sgd_steps, 2 * settings.local_sgd_steps)
    if settings.until_step is not None and settings.until_step <= steps[-1]:
        return None
    first, second = (
        Spec(train.stage, train.version, {**train.settings, "until_step": step}, train.inputs) for step in steps
    )
    inputs = {**merge.inputs, "train": second.ref}
    return Rehearsal(first, second, Spec(merge.stage, merge.version, merge.settings, inputs))
