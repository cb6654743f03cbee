"""Random histories of a table, between kills and stops of the daemon.

A history is what several sessions do to one table or a few: DML and DDL, in transactions with
savepoints, EXCEPTION blocks and two-phase commits, in phases. Between two phases the daemon checks
the catalog, or is killed, or stopped. When all is done the daemon catches up and checks the catalog
once; then the lake folded has to be the source. Nothing has it read a table again for another
reason, which would hide what was lost before.

Many histories are played side by side in one life of the daemon (`life`): each has its own names.
One that differs is played again without some of its steps, until none can be left out (`shrink`).

`python -m tests.histories --count 2000 --server 15 --seed 1` plays many.
"""
