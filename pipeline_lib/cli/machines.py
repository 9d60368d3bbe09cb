"""Commands for machines: doctor, join and calibrate."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.git import how_to_commit
from pipeline_lib.core.language import _
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store

if TYPE_CHECKING:
    from pipeline_lib.hosts.channel import Channel

# The doctor measures the network, so a config may lack its bandwidth: any value passes the check.
UNKNOWN = ("cluster.internode_gbit_s=1",)


def add_to(commands: Any) -> None:
    """Add these commands to the subparsers `commands`."""
    _add_doctor(commands)
    _add_join(commands)
    _add_calibrate(commands)


def _add_doctor(commands: Any) -> None:
    text = _(
        "look at this machine, at hosts, or at nodes of a cluster: what they have, how fast they "
        "are, what is wrong, what to set"
    )
    examine = commands.add_parser("doctor", help=text, description=text)
    examine.add_argument(
        "config", type=Path, nargs="?", help=_("take the number of ranks (and of nodes) from it")
    )
    examine.add_argument(
        "--ranks",
        type=positive,
        help=_("ranks that exchange data; default: one for each GPU, or two without GPUs"),
    )
    examine.add_argument(
        "--hosts",
        nargs="?",
        const="",
        metavar="A,B",
        help=_(
            "examine these machines over ssh, all at once; default: those of the site file or "
            "PIPELINE_HOSTS"
        ),
    )
    examine.add_argument(
        "--profile", choices=("slurm",), help=_("examine nodes of the cluster, in a job")
    )
    examine.add_argument(
        "--nodes",
        type=positive,
        help=_("with --profile: number of nodes; default: that of the config, or 2"),
    )
    examine.add_argument(
        "--timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help=_("with --profile: time to wait in the queue; default: 600"),
    )
    examine.add_argument("--json", type=Path, help=_("also write all results to this file"))
    examine.set_defaults(command=doctor, when_stopped=_("nothing is left running"))


def _add_join(commands: Any) -> None:
    text = _(
        "take part with this machine in a training that snakemake starts on another one "
        "(docs/join.md)"
    )
    joining = commands.add_parser("join", help=text, description=text)
    joining.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help=_("default: MASTER_ADDR and MASTER_PORT")
    )
    joining.add_argument(
        "--node-rank", type=positive, help=_("default: NODE_RANK or RANK, else in order of arrival")
    )
    joining.add_argument(
        "--stay",
        action="store_true",
        help=_("go on when the training is done, for a sweep of several"),
    )
    joining.add_argument(
        "--wait",
        type=positive,
        default=3600,
        metavar="SECONDS",
        help=_("for the first host to listen; default: 3600"),
    )
    joining.set_defaults(command=join, when_stopped=_("this machine has left the training"))


def _add_calibrate(commands: Any) -> None:
    text = _(
        "measure this machine for the plan: its rates, and the layers of a config's model; "
        "writes cluster.json"
    )
    measuring = commands.add_parser("calibrate", help=text, description=text)
    measuring.add_argument(
        "config", type=Path, help=_("of the training that the measurement is for")
    )
    measuring.add_argument(
        "--out", type=Path, default=Path("cluster.json"), help=_("default: cluster.json")
    )
    measuring.add_argument(
        "--ranks",
        type=positive,
        help=_("number of ranks on this machine; default: that of the config"),
    )
    measuring.set_defaults(command=calibrate, when_stopped=_("nothing was written"))


def positive(text: str) -> int:
    """Parse a whole number of at least 1. Raise ArgumentTypeError for anything else."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def doctor(arguments: argparse.Namespace) -> None:
    """Examine this machine, hosts, or nodes of a cluster, and report facts and problems."""
    from pipeline_lib.config.load import load_config
    from pipeline_lib.core.files import write_json
    from pipeline_lib.doctor.advice import advice
    from pipeline_lib.doctor.machine import examine
    from pipeline_lib.doctor.report import report

    if arguments.hosts is not None:
        doctor_of_hosts(arguments)
        return
    if arguments.profile:
        doctor_of_nodes(arguments)
        return
    if arguments.nodes:
        raise ConfigError(
            "doctor --nodes", ["looks at nodes of a cluster: give --profile slurm too"]
        )
    ranks = (
        load_config(arguments.config).cluster.ranks
        if arguments.config and not arguments.ranks
        else arguments.ranks
    )
    facts = examine(Store.from_env(os.environ).root, ranks, os.environ, say)
    wrong = advice(facts)
    if arguments.json:
        write_json(arguments.json, {"facts": facts, "wrong": wrong})
    say(report(facts, wrong))


def doctor_of_hosts(arguments: argparse.Namespace) -> None:
    """Examine hosts over ssh: check as before a training, then measure on and between them."""
    from pipeline_lib.config.load import load_config
    from pipeline_lib.core.files import write_json
    from pipeline_lib.doctor.hosts import HostsExamination
    from pipeline_lib.doctor.node_advice import together
    from pipeline_lib.doctor.nodes_report import nodes_report
    from pipeline_lib.hosts.listing import hosts_of, read_hosts
    from pipeline_lib.plan.one_node import compare_with_one_node
    from pipeline_lib.slurm.site import Site

    given = arguments.hosts
    path = arguments.config
    # --hosts also takes a config that follows it
    if path is None and given.endswith((".yaml", ".yml")):
        given, path = "", Path(given)
    site = Site.load(os.environ)
    hosts = read_hosts(given, "doctor --hosts") if given else hosts_of(site)
    others = {
        "--profile": arguments.profile,
        "--nodes": arguments.nodes,
        "--ranks": arguments.ranks,
    }
    problems = [
        f"cannot be combined with {option}: it examines the hosts that it names"
        for option in others
        if others[option]
    ]
    if len(hosts) < 2:
        text = (
            f"needs two hosts or more, and has {hosts[0].name if hosts else 'none'}: name them "
            "as A,B, or else in"
        )
        problems.append(
            f"{text} `hosts` of the site file or PIPELINE_HOSTS; for this machine alone, leave it "
            "out"
        )
    if problems:
        raise ConfigError("doctor --hosts", problems)
    config = load_config(path, UNKNOWN) if path else None
    store = Store.from_env(os.environ)
    found = HostsExamination(
        hosts, config.cluster if config else None, store, site, os.environ
    ).findings(say)
    wrong = together(found)
    comparison = None
    if config and found.sent_gbit_s:
        comparison = compare_with_one_node(config, len(hosts), found.sent_gbit_s, store)
    if arguments.json:
        write_json(
            arguments.json, {"facts": found.to_json(), "wrong": wrong, "one_node": comparison}
        )
    say(nodes_report(found, wrong, comparison))


def doctor_of_nodes(arguments: argparse.Namespace) -> None:
    """Examine nodes of the cluster by a SLURM job on them."""
    from pipeline_lib.config.load import load_config
    from pipeline_lib.config.schema import Cluster
    from pipeline_lib.core.files import write_json
    from pipeline_lib.doctor.node_advice import together
    from pipeline_lib.doctor.nodes import NodesExamination
    from pipeline_lib.doctor.nodes_report import nodes_report
    from pipeline_lib.slurm.site import Site

    if arguments.ranks:
        problem = (
            "is for this machine alone; on a cluster the config says it "
            "(cluster.gpus_per_node, cluster.cpu_ranks)"
        )
        raise ConfigError("doctor --ranks", [problem])
    cluster = (
        load_config(arguments.config, UNKNOWN).cluster if arguments.config else Cluster(nodes=2)
    )
    store = Store.from_env(os.environ).root
    site = Site.load(os.environ)
    examination = NodesExamination(
        cluster, arguments.nodes or cluster.nodes, store, site, os.environ
    )
    found = examination.findings(arguments.timeout, say)
    wrong = together(found)
    if arguments.json:
        write_json(arguments.json, {"facts": found.to_json(), "wrong": wrong})
    say(nodes_report(found, wrong))


def join(arguments: argparse.Namespace) -> None:
    """Join the training of the first host, and start this machine's ranks when it says so."""
    from pipeline_lib.hosts.join_settings import (
        FirstHost,
        address_from,
        node_rank_of,
        parse_address,
        read_secret,
    )
    from pipeline_lib.hosts.joining import connect
    from pipeline_lib.launch.agent import serve_by_joining

    secret = read_secret(os.environ)
    if arguments.address:
        first = FirstHost(*parse_address(arguments.address), node_rank_of(os.environ))
    else:
        first = address_from(os.environ)
    rank = arguments.node_rank or first.node_rank

    def connected() -> "Channel":
        return connect(first.address, first.port, secret, rank, arguments.wait, say)

    serve_by_joining(connected, os.environ, arguments.wait, arguments.stay, say)


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure the rates and layer times that the plan needs, write cluster.json and show them."""
    from pipeline_lib.calibrate.report import report
    from pipeline_lib.calibrate.run import Calibration
    from pipeline_lib.calibrate.task import busy
    from pipeline_lib.config.load import load_config
    from pipeline_lib.core.files import write_json
    from pipeline_lib.plan.known import geometry_of, learn_architecture, workload_of

    config = load_config(arguments.config)
    store = Store.from_env(os.environ)
    learn_architecture(config, store, say)
    geometry = geometry_of(config, store)
    workload = workload_of(config, store)
    if geometry.delta is not None:
        raise DataError(
            "calibrate does not measure layers with a gated delta rule yet: `plan` counts with "
            "formulas"
        )
    if problem := busy(os.getloadavg()[0]):
        say(f"warning: {problem}")
    calibration = Calibration.of(
        config, geometry, workload, arguments.ranks, store.root, os.environ
    )
    measured, left_out = calibration.measure(say)
    if calibration.is_first:
        write_json(arguments.out, measured)
        say(report(calibration.task, measured, left_out, arguments.out, config.cluster))
        if command := how_to_commit([arguments.out], "Calibration"):
            say(command)
