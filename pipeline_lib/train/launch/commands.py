"""The command lines of the launchers that are programs of their own: accelerate, deepspeed and srun."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.base.fsio import write_json

RANK_MODULE = ("pipeline_lib", "rank")


def launcher_command(
    plan: Mapping[str, Any], environ: dict[str, str], run_dir: Path, rank_arguments: list[str]
) -> list[str]:
    """What starts the ranks of `plan`; `environ` is theirs, and may be narrowed. Raises ConfigError."""
    cluster = plan["cluster"]
    make = {"accelerate": _accelerate, "deepspeed": _deepspeed, "srun": _srun}[cluster["launcher"]]
    return [*make(cluster, environ, run_dir), *rank_arguments]


def _accelerate(cluster: Mapping[str, Any], environ: Mapping[str, str], run_dir: Path) -> list[str]:
    """`accelerate launch`, with a config file of ours: the user's own one, made for other work, is not read.

    MULTI_GPU is accelerate's word for torch's elastic agent, which serves ranks on the CPU as well.
    """
    config = run_dir / "accelerate.json"
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if cluster["ranks"] > 1 else "NO",
        "num_processes": cluster["ranks"],
        "num_machines": 1,
        "machine_rank": 0,
        "gpu_ids": "all",
        "main_process_port": int(environ["MASTER_PORT"]),
        "mixed_precision": "no",
        "use_cpu": cluster["device"] == "cpu",
        "debug": False,
    }
    write_json(config, settings)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*command, "--num_cpu_threads_per_process", environ["OMP_NUM_THREADS"], "-m", *RANK_MODULE]


def _deepspeed(cluster: Mapping[str, Any], environ: dict[str, str], run_dir: Path) -> list[str]:
    """`deepspeed`, without a host file: /job/hostfile, which it would read, was made for other work.

    It renumbers the GPUs from 0 when told a number of them, so the visible ones are narrowed instead.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            str(run_dir), ["cluster.launcher: deepspeed is not installed: pip install 'qwen3-pipeline[deepspeed]'"]
        )
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(run_dir / "no-hostfile")]
    command += ["--master_port", environ["MASTER_PORT"], "--log_level", "error", "--no_local_rank"]
    if visible := environ.get("CUDA_VISIBLE_DEVICES"):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: cluster["ranks"]])
    else:
        command += ["--num_gpus", str(cluster["ranks"])]
    return [*command, "--module", *RANK_MODULE]


def _srun(cluster: Mapping[str, Any], environ: Mapping[str, str], run_dir: Path) -> list[str]:
    """One task for each rank, in the job that runs already. A task that fails ends the others."""
    if "SLURM_JOB_ID" not in environ:
        raise ConfigError(
            str(run_dir),
            ["cluster.launcher: srun starts tasks within a SLURM job, and this is none; submit it, or use torchrun"],
        )
    ranks, gpus = cluster["ranks"], cluster["device"] == "cuda"
    command = ["srun", "--nodes", "1", "--ntasks", str(ranks), "--cpus-per-task", str(cluster["cpus_per_rank"])]
    command += ["--kill-on-bad-exit=1", "--overlap", "--input", "none", "--export", "ALL"]
    if gpus:
        command += ["--gres", f"gpu:{ranks}"]
    return [*command, sys.executable, "-m", *RANK_MODULE]
