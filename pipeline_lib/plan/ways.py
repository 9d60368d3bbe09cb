"""A table of ways to train: complete settings of all keys, a row each.

All keys of a way but two are those of its kind, a `Train` that several rows share. Its micro-batch
and the number of its layers that keep the attention's results are columns, for which formulas are
arrays of numbers. What depends on other keys is computed once for each of their values (`each`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import AUTO, Train

Column = NDArray[np.float64]  # a number for each way
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Ways:
    """A table of ways: int64[ways] each.

    Row i trains as `kinds[kind[i]]`, in micro-batches of `micro_batch_blocks[i]` blocks, and
    `kept_layers[i]` of the model's `attention_layers` may keep the attention's results.
    """

    kinds: Sequence[Train]
    kind: NDArray[np.int64]
    micro_batch_blocks: NDArray[np.int64]
    kept_layers: NDArray[np.int64]
    attention_layers: int
    _groups: dict[tuple[str, ...], tuple[list[Train], NDArray[np.int64]]] = field(
        default_factory=dict, repr=False
    )

    @staticmethod
    def one(train: Train, geometry: Geometry) -> "Ways":
        """Return the table of one way, whose `kept_attention_layers: auto` means all."""
        kept = train.kept_attention_layers
        layers = geometry.attention_layers
        return Ways(
            kinds=(train,),
            kind=np.zeros(1, np.int64),
            micro_batch_blocks=np.array([train.micro_batch_blocks]),
            kept_layers=np.array([layers if kept == AUTO else kept]),
            attention_layers=layers,
        )

    def __len__(self) -> int:
        """Return the number of ways."""
        return len(self.kind)

    def train(self, row: int) -> Train:
        """Return the settings of a way."""
        kind = self.kinds[int(self.kind[row])]
        kept = int(self.kept_layers[row])
        changes: dict[str, Any] = {
            "micro_batch_blocks": int(self.micro_batch_blocks[row]),
            "kept_attention_layers": AUTO if kept == self.attention_layers else kept,
        }
        if kind.kept_attention_layers != AUTO:
            del changes["kept_attention_layers"]
        return kind.model_copy(update=changes)

    def at(self, rows: Mask | NDArray[np.int64] | slice) -> "Ways":
        """Return the table of some of the ways, by a mask, by their numbers, or by a range."""
        used, kind = np.unique(self.kind[rows], return_inverse=True)
        return Ways(
            kinds=[self.kinds[number] for number in used],
            kind=kind,
            micro_batch_blocks=self.micro_batch_blocks[rows],
            kept_layers=self.kept_layers[rows],
            attention_layers=self.attention_layers,
        )

    def parts(self, size: int) -> Iterator["Ways"]:
        """Yield the table in parts of up to `size` ways."""
        for start in range(0, len(self), size):
            yield self.at(slice(start, start + size))

    def each(self, function: Callable[[Train], float | Sequence[float]], *keys: str) -> Column:
        """Return `function` of each way's kind, of which it reads no key that varies but `keys`.

        It is float64[ways], or float64[n, ways] if the function returns n numbers.
        """
        kinds, row = self._by(keys)
        values: Column = np.array([function(kind) for kind in kinds], np.float64)
        return values.T[..., row]

    def _by(self, keys: tuple[str, ...]) -> tuple[list[Train], NDArray[np.int64]]:
        """Return a kind for each combination of values of `keys`, and which of them a way has."""
        if keys not in self._groups:
            found: dict[tuple[object, ...], int] = {}
            kinds: list[Train] = []
            number_of: list[int] = []
            for kind in self.kinds:
                values = tuple([getattr(kind, key) for key in keys])
                if values not in found:
                    found[values] = len(kinds)
                    kinds.append(kind)
                number_of.append(found[values])
            self._groups[keys] = (kinds, np.array(number_of)[self.kind])
        return self._groups[keys]

    def which(self, function: Callable[[Train], bool], *keys: str) -> Mask:
        """Return for which ways `function`, as in `each`, is true: bool[ways]."""
        return self.each(function, *keys) > 0
