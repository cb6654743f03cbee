# ruff: noqa: INP001 - a notebook of Fabric: import it into a workspace, or paste it into a cell
"""A notebook of Microsoft Fabric that brings mirrors and histories to the lake's last epoch.

The environment of the notebook has ingestd's wheel (docs/platforms/fabric.md). The jobs run in the
notebook's session, and leave it running.
"""

from spark_jobs import history, mirror

LAKE = "abfss://WORKSPACE@onelake.dfs.fabric.microsoft.com/LAKEHOUSE.Lakehouse/Files"
SOURCE = "shop"

for job in (mirror, history):
    name = job.__name__.rpartition(".")[2]
    given = ["--lake", f"{LAKE}/raw", "--source", SOURCE, "--target", f"{LAKE}/{name}", "--once"]
    code = job.main(given)
    if code:
        raise RuntimeError(f"{name} ended with exit code {code}: see the messages above")
