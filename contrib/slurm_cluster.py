"""Start TwinGrad's workers by Slurm, one on each node, and print the scheduler's address for `twingrad run --dask`.

    python -m contrib.slurm_cluster --nodes 4 --cores 2 --memory "8 GB" --walltime 02:00:00

The workers end with this program, and jobs that wait in the queue are taken back.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.cluster import RESOURCE


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to ask of Slurm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cores", type=int, default=2, help="of a node (2)")
    parser.add_argument("--memory", default="8 GB", help="of a node (8 GB)")
    parser.add_argument("--walltime", default="04:00:00")
    parser.add_argument("--queue", help="Slurm's partition")
    parser.add_argument("--dry-run", action="store_true", help="print the job's script, and start nothing")
    return parser.parse_args(arguments)


def cluster_of(asked: argparse.Namespace) -> Any:
    """A cluster whose workers have a node each, with the whole resource of it."""
    try:
        from dask_jobqueue import SLURMCluster
    except ImportError:
        sys.exit("error: this needs the package dask-jobqueue: pip install 'twingrad[dask]'")
    return SLURMCluster(
        cores=asked.cores,
        processes=1,
        memory=asked.memory,
        walltime=asked.walltime,
        queue=asked.queue,
        job_extra_directives=["--exclusive"],
        worker_extra_args=["--resources", f"{RESOURCE}=1"],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the workers and wait for ctrl-C, or print the script."""
    asked = options(arguments)
    with cluster_of(asked) as cluster:
        if asked.dry_run:
            print(cluster.job_script())
            return
        cluster.scale(jobs=asked.nodes)
        print(f"{cluster.scheduler_address}  (ctrl-C ends the workers)", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(60)


if __name__ == "__main__":
    main()
