"""Where an assistant's message thinks: in `reasoning_content`, or in one `<think>` block at the start of its text.

Rows with think tags anywhere else are refused before they come here (rows/conversation.py).
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from pipeline_lib.data.rows.layout import Message

_BLOCK = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
_END = re.compile(r"</think>(?:\s*\n)?")
# The prompt may have opened it already.
_EMPTY_BLOCK = re.compile(r"(?:\s*<think>)?\s*</think>(?:\s*\n)?")


def thinking_of(message: Message) -> str:
    """What the assistant's `message` thinks before it answers; the empty text if nothing."""
    if reasoning := message.get("reasoning_content"):
        return str(reasoning).strip()
    block = _BLOCK.match(message["content"])
    return block[1].strip() if block else ""


def thinking_modes(messages: Sequence[Message]) -> list[bool]:
    """For each message whether the model answers the user's message before it, or at it, with thinking on.

    Who asks switches thinking on or off once for a question: it is on in all steps with tools if any of them thinks.
    """
    questions = list(accumulate(message["role"] == "user" for message in messages))
    thinking = {
        question
        for question, message in zip(questions, messages, strict=True)
        if message["role"] == "assistant" and thinking_of(message)
    }
    return [question in thinking for question in questions]


def without_thinking(message: Message) -> Message:
    """`message` without the thinking of an assistant, be it in a field of its own or in the text."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    block = _BLOCK.match(message["content"])
    return {**kept, "content": message["content"][block.end() :]} if block else kept


def end_of_thinking(message: Message, rendered: str, start: int) -> int | None:
    """Where in `rendered` the thinking of `message`, written from `start` on, ends with its blank lines.

    0 if it does not think and the template writes no empty block either; None if nothing tells where the thinking ends.
    """
    thought = thinking_of(message)
    if not thought:
        block = _EMPTY_BLOCK.match(rendered, start)
        return block.end() if block else 0
    end = _END.search(rendered, start)
    return end.end() if end and rendered[start : end.start()].rstrip().endswith(thought) else None
