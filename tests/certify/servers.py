"""Servers on loopback that serve a tiny model by transformers, right or wrong on purpose."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

VLLM = frozenset({"tokenize", "tokenize-chat", "logprobs", "echo", "usage"})
LLAMA = frozenset({"tokenize", "apply-template", "logprobs", "usage"})
BARE = frozenset({"usage"})  # transformers serve
NOTHING = frozenset[str]()


@dataclass
class TinyServer:
    """A model that is served, and what the server offers of it, or does wrong."""

    folder: Path
    offers: frozenset[str] = VLLM
    names: tuple[str, ...] = ("tuned",)
    weights: Path | None = None  # of another model than the folder's
    rounded: torch.dtype | None = None  # the type to which weights are rounded
    template: str | None = None
    stops: bool = True
    keeps_special: bool = False
    passes_variables: bool = True
    refuses_unknown: bool = False
    key: str | None = None
    status: int | None = None  # of every reply
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            self.weights or self.folder, dtype=torch.float32
        )
        if self.rounded is not None:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(self.rounded).float()
        self.lock = threading.Lock()

    def prompt(self, body: Mapping[str, Any]) -> str:
        """The prompt, with the arguments of calls as objects, as the servers give them."""
        messages = []
        for message in body["messages"]:
            one = dict(message)
            if "tool_calls" in one:
                one["tool_calls"] = [_with_parsed(call) for call in one["tool_calls"]]
            messages.append(one)
        variables = body.get("chat_template_kwargs", {}) if self.passes_variables else {}
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                tools=body.get("tools"),
                add_generation_prompt=True,
                tokenize=False,
                chat_template=self.template,
                **variables,
            )
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def nats(self, tokens: list[int]) -> list[float | None]:
        logits = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        found: list[float | None] = [None]
        for place, token in enumerate(tokens[1:]):
            found.append(float(logits[place, token]))
        return found

    def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        prompt = self.ids(self.prompt(body))
        most = body["max_tokens"]
        stops = {} if self.stops else {"eos_token_id": None}
        with torch.no_grad():
            output = self.model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=most, **stops
            )
        tokens = output[0, len(prompt) :].tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=not self.keeps_special)
        has_ended = self.stops and tokens[-1] in self.model.generation_config.eos_token_id
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop" if has_ended else "length",
        }
        # as llama-cpp-python's server: others do without the second
        is_asked = body.get("logprobs") and body.get("top_logprobs")
        if "logprobs" in self.offers and is_asked:
            nats = self.nats(prompt + tokens)[len(prompt) :]
            texts = [self.tokenizer.decode([token]) for token in tokens]
            content = [
                {"token": token, "logprob": one} for token, one in zip(texts, nats, strict=True)
            ]
            choice["logprobs"] = {"content": content}
        reply: dict[str, Any] = {"choices": [choice]}
        if "usage" in self.offers:
            reply["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
        return reply

    def reply(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if self.status is not None:
            return self.status, {"error": f"said with the key {self.key}"}
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in self.names]}
        if body.get("model") not in self.names:
            return 404, {"error": "no such model"}
        if path == "/v1/chat/completions":
            if self.refuses_unknown and "logprobs" in body:
                return 422, {"detail": "Unexpected fields in the request: logprobs"}
            return 200, self.answer(body)
        if path == "/tokenize" and "messages" in body and "tokenize-chat" in self.offers:
            return 200, {"tokens": self.ids(self.prompt(body))}
        if path == "/tokenize" and "tokenize" in self.offers:
            return 200, {"tokens": self.ids(body.get("content", ""))}
        if path == "/apply-template" and "apply-template" in self.offers:
            return 200, {"prompt": self.prompt(body)}
        if path == "/v1/completions" and body.get("echo") and "echo" in self.offers:
            nats = [*self.nats(body["prompt"]), -0.5]
            return 200, {"choices": [{"logprobs": {"token_logprobs": nats}}]}
        if path == "/v1/completions" and "prompt_logprobs" in body and "given" in self.offers:
            tokens = body["prompt"]
            entries = [
                one if one is None else {str(token): {"logprob": one}}
                for token, one in zip(tokens, self.nats(tokens), strict=True)
            ]
            return 200, {"choices": [{"text": "", "prompt_logprobs": entries}]}
        return 404, {"detail": "Not Found"}


def _with_parsed(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


@contextmanager
def serving(served: TinyServer) -> Iterator[str]:
    """The endpoint of a server of `served`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(json.loads(content))

        def _reply(self, body: dict[str, Any]) -> None:
            served.asked.append((self.path, body))
            with served.lock:
                status, reply = served.reply(self.path, body)
            if served.key and self.headers["Authorization"] != f"Bearer {served.key}":
                status, reply = 401, {"error": "unauthorized"}
            content = json.dumps(reply).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", "http://127.0.0.1:9/elsewhere")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
