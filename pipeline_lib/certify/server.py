"""A client of OpenAI-compatible servers: chat, prompts as the server renders them, probabilities.

Servers offer different endpoints. A method whose endpoint or option a server lacks raises
NotOffered with what the server said. No redirect is followed, and neither proxies nor passwords are
read from the environment or from .netrc, so that the key goes to the endpoint alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import BaseModel, ValidationError

from pipeline_lib.certify.questions import ServerQuestion
from pipeline_lib.core.errors import ConfigError, PipelineError, ServerError
from pipeline_lib.core.text import MASK, shortened

KEY_VARIABLE = "CERTIFY_API_KEY"
CONNECT_S = 10.0
ANSWER_S = 600.0  # a large model on CPUs may take minutes for an answer
MOST_BYTES = 64 << 20  # of a reply
_SAID_CHARS = 200
# llama-cpp-python's server gives none without a number of the likeliest
_WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 1}
_OPENAI_PATH = "/v1"
_REFUSED = (401, 403)
_BUSY = (429, 503)  # llama-server says 503 while it loads the model


class NotOffered(PipelineError):
    """The server has no such endpoint or option; the text says what it answered."""


@dataclass(frozen=True)
class TokenProbability:
    """A generated token as the server writes it, and its log-probability in nats."""

    text: str
    nats: float


@dataclass(frozen=True)
class ChatAnswer:
    """An answer of a chat completion.

    `reasoning` is what the server's reasoning parser took out of the text, None if it took nothing.
    `has_calls` tells that a tool parser took calls out of it. `prompt_tokens` is None, and `tokens`
    are empty, if the server does not say them.
    """

    content: str
    reasoning: str | None
    has_calls: bool
    finish_reason: str
    prompt_tokens: int | None
    tokens: Sequence[TokenProbability]

    @property
    def text(self) -> str:
        """All that the model wrote, but calls that a tool parser took out of it."""
        return (self.reasoning or "") + self.content


# Replies, as far as they are read.


class _ChatMessage(BaseModel):
    content: str | None = None
    reasoning: str | None = None  # newer vLLM
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Token(BaseModel):
    token: str
    logprob: float


class _Tokens(BaseModel):
    content: list[_Token] | None = None


class _Choice(BaseModel):
    message: _ChatMessage
    finish_reason: str | None = None
    logprobs: _Tokens | None = None


class _Usage(BaseModel):
    prompt_tokens: int


class _Chat(BaseModel):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Echoed(BaseModel):
    token_logprobs: list[float | None]


class _Completion(BaseModel):
    logprobs: _Echoed | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class _Completions(BaseModel):
    choices: list[_Completion]


class _Ids(BaseModel):
    tokens: list[int]


class _Prompt(BaseModel):
    prompt: str


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: list[_Model]


Reply = TypeVar("Reply", bound=BaseModel)


class Server:
    """An OpenAI-compatible server at `endpoint`, such as http://localhost:8000/v1."""

    def __init__(self, endpoint: str, model: str | None = None, key: str | None = None) -> None:
        """Prepare requests for `model`, with `key` if the server wants one; send nothing yet.

        Raises ConfigError if `endpoint` is no http or https address.
        """
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--endpoint", [f"{endpoint}: no address like http://HOST:PORT/v1"])
        self.endpoint = endpoint.rstrip("/")
        self.model = model
        self._root = self.endpoint.removesuffix(_OPENAI_PATH)
        self._key = key
        self._client = httpx2.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S),
            follow_redirects=False,
            trust_env=False,
        )

    def choose_model(self) -> str:
        """Return the name that requests give: that of the user, or the only one that is served.

        Raises ConfigError if there are several or none, ServerError if the server cannot be
        reached.
        """
        if self.model is None:
            try:
                served = self._reply(_Models, "GET", f"{self.endpoint}/models", None).data
            except NotOffered as error:
                raise ConfigError("--model", [f"the served model's name is needed: {error}"]) from (
                    error
                )
            names = [one.id for one in served]
            if len(names) != 1:
                listed = shortened(", ".join(names), _SAID_CHARS) or "none"
                raise ConfigError("--model", [f"name the served model; the server lists: {listed}"])
            self.model = names[0]
        return self.model

    def chat(self, question: ServerQuestion, max_tokens: int) -> ChatAnswer:
        """Return the greedy answer to `question`, with probabilities if the server gives them.

        Raises NotOffered if the server refuses the question.
        """
        body = {**self._asked(question), "temperature": 0, "max_tokens": max_tokens}
        url = f"{self.endpoint}/chat/completions"
        try:
            reply = self._reply(_Chat, "POST", url, {**body, **_WITH_LOGPROBS})
        except NotOffered:  # some servers refuse what they do not know
            reply = self._reply(_Chat, "POST", url, body)
        if not reply.choices:
            raise NotOffered(f"{url}: a reply without an answer")
        choice = reply.choices[0]
        message = choice.message
        tokens = choice.logprobs.content if choice.logprobs else None
        return ChatAnswer(
            content=message.content or "",
            reasoning=message.reasoning_content or message.reasoning,
            has_calls=bool(message.tool_calls),
            finish_reason=choice.finish_reason or "",
            prompt_tokens=reply.usage.prompt_tokens if reply.usage else None,
            tokens=[TokenProbability(each.token, each.logprob) for each in tokens or []],
        )

    def prompt_ids(self, question: ServerQuestion) -> list[int]:
        """Return the token ids of the prompt as the server renders `question` (vLLM).

        Raises NotOffered.
        """
        return self._tokens({**self._asked(question), "add_generation_prompt": True})

    def prompt_text(self, question: ServerQuestion) -> str:
        """Return the prompt as the server renders `question` (llama-server). Raises NotOffered."""
        url = f"{self._root}/apply-template"
        return self._reply(_Prompt, "POST", url, self._asked(question)).prompt

    def token_ids(self, text: str) -> list[int]:
        """Return the token ids of `text`, in which special tokens count (vLLM, SGLang, llama).

        Raises NotOffered.
        """
        of_vllm_and_sglang = {"prompt": text, "add_special_tokens": False}
        of_llama = {"content": text, "add_special": False, "parse_special": True}
        return self._tokens({"model": self.model, **of_vllm_and_sglang, **of_llama})

    def nats_of(self, tokens: Sequence[int]) -> list[float | None]:
        """Return the log-probability of each of `tokens` after those before it, None if unknown.

        Raises NotOffered.
        """
        body = {"model": self.model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0}
        url = f"{self.endpoint}/completions"
        for options in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
            try:
                reply = self._reply(_Completions, "POST", url, {**body, **options})
            except NotOffered as error:
                reason = str(error)
                continue
            reason = f"{url}: a reply without the log-probabilities of the prompt"
            found = _nats_in(reply, tokens)
            if len(found) >= len(tokens):
                return found[: len(tokens)]
        raise NotOffered(reason)

    def _asked(self, question: ServerQuestion) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "messages": question.request_messages}
        if question.tools:
            body["tools"] = question.tools
        if question.variables:
            body["chat_template_kwargs"] = question.variables
        return body

    def _tokens(self, body: Mapping[str, Any]) -> list[int]:
        url = f"{self._root}/tokenize"
        found = self._reply(_Ids, "POST", url, body).tokens
        if not found:  # llama-server ignores the messages that it does not know
            raise NotOffered(f"{url}: no tokens for this request")
        return found

    def _reply(self, kind: type[Reply], method: str, url: str, body: Any) -> Reply:
        status, content = self._exchange(method, url, body)
        if status in _REFUSED:
            raise ServerError(f"{url}: HTTP {status}; set {KEY_VARIABLE} to a key of this server")
        if status in _BUSY:
            raise ServerError(f"{url}: HTTP {status}, it is busy or still loading; try again later")
        if 300 <= status < 400:
            raise ServerError(f"{url}: a redirect, which is not followed; give its target instead")
        if status >= 400:
            raise NotOffered(f"{url}: HTTP {status} {self._shown(content)}".rstrip())
        try:
            return kind.model_validate(json.loads(content))
        except (ValueError, RecursionError, ValidationError) as error:
            raise NotOffered(f"{url}: a reply of another form: {self._shown(content)}") from error

    def _exchange(self, method: str, url: str, body: Any) -> tuple[int, bytes]:
        """Return the status and the content of the reply. Raises ServerError if there is none."""
        content = bytearray()
        try:
            with self._client.stream(method, url, json=body) as reply:
                for piece in reply.iter_bytes():
                    content += piece
                    if len(content) > MOST_BYTES:
                        raise ServerError(f"{url}: a reply of more than {MOST_BYTES >> 20} MiB")
                return reply.status_code, bytes(content)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            reason = self._shown(str(error).encode()) or type(error).__name__
            raise ServerError(
                f"{url}: the server cannot be reached ({reason}); start it, or give another "
                "--endpoint"
            ) from error

    def _shown(self, content: bytes) -> str:
        """Return the beginning of `content` on one line, without the key."""
        text = content.decode(errors="replace")
        if self._key:
            text = text.replace(self._key, MASK)
        return shortened(text, _SAID_CHARS)


def _nats_in(reply: _Completions, tokens: Sequence[int]) -> list[float | None]:
    """Return the log-probabilities of the prompt's `tokens`; fewer if they are not in `reply`."""
    if not reply.choices:
        return []
    choice = reply.choices[0]
    if choice.logprobs is not None:
        return choice.logprobs.token_logprobs
    found: list[float | None] = []
    for token, entries in zip(tokens, choice.prompt_logprobs or [], strict=False):
        entry = (entries or {}).get(str(token))
        nats = entry.get("logprob") if isinstance(entry, dict) else None
        found.append(float(nats) if isinstance(nats, int | float) else None)
    return found
