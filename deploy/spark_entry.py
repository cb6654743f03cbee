# ruff: noqa: INP001 - spark-submit runs it by its path
"""Runs one of ingestd's jobs on a cluster that has the wheel. The first argument names the job.

    spark-submit ... spark_entry.py mirror --lake s3://lake/raw --source shop --target s3://m --once

AWS Glue adds other arguments and wants a value for each of ours. There, the job and its
arguments are the value of one: `--ingestd_arguments "mirror --lake s3://lake/raw ... --once"`.
"""

import importlib
import shlex
import sys

JOBS = ("backfill", "feed", "history", "mirror", "reconcile")
IN_ONE = "--ingestd_arguments"


def job_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """Return the name of the job and its arguments. Exits with code 2 for another name."""
    if IN_ONE in words[:-1]:
        words = shlex.split(words[words.index(IN_ONE) + 1])
    job, *arguments = words or [""]
    if job not in JOBS:
        sys.stderr.write(f"the first argument must be one of {', '.join(JOBS)}, not {job!r}\n")
        sys.exit(2)
    return job, arguments


if __name__ == "__main__":
    name, sys.argv[1:] = job_and_arguments(sys.argv[1:])
    importlib.import_module(f"spark_jobs.{name}").run()
