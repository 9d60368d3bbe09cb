"""What there is to train on, as far as time and memory depend on it: from the shards, or assumed before they exist."""

from dataclasses import dataclass

from pipeline_lib.config.schema import Config


@dataclass(frozen=True)
class Workload:
    """Blocks of `block_tokens` positions; fractions are of those.

    `document_tokens` is the mean length of a document weighted by tokens, sum(n^2) / sum(n): what attention costs
    go by. `blocks` and `epoch_blocks` are None while there is no data. `is_assumed` says that all but the block is.
    """

    block_tokens: int
    real_fraction: float
    supervised_fraction: float
    document_tokens: float
    blocks: int | None
    epoch_blocks: int | None
    validation_blocks: int = 0
    is_assumed: bool = False

    @staticmethod
    def assumed(config: Config) -> "Workload":
        """Before any data is read: nearly full blocks, half of them supervised, documents of a quarter of the most."""
        block = config.shard.block_tokens
        longest = min(config.tokenize.max_tokens, block)
        return Workload(block, 0.98, 0.5, max(1.0, longest / 4), None, None, is_assumed=True)
