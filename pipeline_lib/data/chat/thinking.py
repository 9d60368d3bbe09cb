"""Where an assistant's message thinks: in `reasoning_content`, or in a `<think>` block of its text, as Qwen3 has it."""

import re

from pipeline_lib.data.rows.layout import Message

# A thinking block, or its end where the beginning was part of the prompt; and the line ends behind it.
_BLOCK = re.compile(r"\A(?:(?!<think>).)*?</think>\n*|<think>.*?</think>\n*", re.DOTALL)
_END = re.compile(r"</think>(?:\s*\n)?")


def has_thinking(message: Message) -> bool:
    """Whether the assistant's `message` thinks before it answers; an empty thinking block does not count."""
    if reasoning := message.get("reasoning_content"):
        return bool(reasoning.strip())
    before, closing, _ = message["content"].partition("</think>")
    return bool(closing and before.rpartition("<think>")[2].strip())


def without_thinking(message: Message) -> Message:
    """`message` without the thinking of an assistant, be it in a field of its own or in the text."""
    if message["role"] != "assistant":
        return message
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": _BLOCK.sub("", message["content"])}


def end_of_thinking(text: str, start: int) -> int:
    """Behind the first `</think>` of a rendered `text` from `start` on and the blank lines after it; 0 if none."""
    end = _END.search(text, start)
    return end.end() if end else 0
