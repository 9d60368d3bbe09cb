"""The command `certify`: whether a running server serves the model in a folder."""

import argparse
import os
import sys
from typing import Any

from pipeline_lib.certify.tolerances import TOLERANCES
from pipeline_lib.cli.chat import model_of, tell
from pipeline_lib.cli.machines import positive
from pipeline_lib.core.language import _
from pipeline_lib.core.processes import importing
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store


def add_to(commands: Any) -> None:
    """Add `certify` to the subparsers `commands`."""
    text = _("ask a running server whether what it serves is the model in a folder")
    sub = commands.add_parser("certify", help=text, description=f"{text}; docs/serve.md")
    sub.add_argument(
        "folder",
        metavar="MODEL",
        help=_("a model folder such as results/NAME/model, an experiment's name, or a config"),
    )
    sub.add_argument(
        "--endpoint",
        required=True,
        metavar="URL",
        help=_(
            "an OpenAI-compatible server, such as http://localhost:8000/v1; its key, if it wants "
            "one, is read from the environment variable CERTIFY_API_KEY"
        ),
    )
    sub.add_argument(
        "--model", metavar="NAME", help=_("the served model; default: the only one that is served")
    )
    sub.add_argument(
        "--weights",
        choices=TOLERANCES,
        default="bf16",
        help=_("what the server holds the weights in, which sets the tolerances; default: bf16"),
    )
    sub.add_argument(
        "--prompts",
        type=positive,
        default=4,
        metavar="N",
        help=_("prompts of one turn, at most; default: 4"),
    )
    sub.add_argument(
        "--max-new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help=_("tokens of an answer that are compared; default: 64"),
    )
    sub.add_argument("--json", action="store_true", help=_("print a JSON object instead of text"))
    sub.set_defaults(command=certify, when_stopped=_("nothing was changed"))


def certify(arguments: argparse.Namespace) -> None:
    """Show the certificate of a server.

    Raise ServedDiffers afterwards if anything differs, ServerError if nothing could be checked.
    """
    store = Store.from_env(os.environ)
    folder = model_of(arguments.folder, store)
    with importing():
        from pipeline_lib.certify.certificate import certify as certify_server
        from pipeline_lib.certify.certificate import show, to_json
        from pipeline_lib.certify.server import KEY_VARIABLE, Server

    server = Server(arguments.endpoint, arguments.model, os.environ.get(KEY_VARIABLE))
    found = certify_server(
        folder,
        store,
        server,
        arguments.weights,
        arguments.prompts,
        arguments.max_new_tokens,
        tell,
    )
    if arguments.json:
        say(to_json(found))
    else:
        show(found, sys.stdout)
    found.raise_unless_same()
