"""What it costs that a conversation becomes a sample for each answer where the template rewrites earlier turns."""


def repetition(conversations: int | None, samples: int | None, tokens: int | None, repeated: int | None) -> str:
    """How many times the tokens of one sample a conversation all `samples` have; the empty text if as many, or unknown.

    `repeated` tokens are those of all samples of a conversation but its longest.
    """
    if not conversations or not samples or not tokens or not repeated:
        return ""
    once = tokens - repeated
    if tokens < 1.05 * once:
        return ""
    return (
        f"{samples:,} samples of {conversations:,} conversations have {tokens / once:.1f} times the tokens of one "
        f"sample each ({tokens:,} against {once:,}): the chat template renders an earlier turn otherwise than the "
        "last, so each answer needs its own"
    )
