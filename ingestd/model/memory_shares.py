"""How `limits.memory` is shared out (I9).

Each source has the same share of it. Of a source's share:

=======================  ======  =============================================================
`CONNECTOR`              1/4     what is read ahead of the pipeline
`EPOCH_BUFFER`           1/6     rows that wait for their row group; open files take half of
                                 that again, 1.5 times in an object store
`REFERENCE_BUFFER`       1/8     the same, of one reference table
`REFERENCE_FOLD`         1/16    changes that are folded at a time, which takes several times
                                 that
=======================  ======  =============================================================

Of a connector's memory, which is that of one `kind`:

=======================  ======  =============================================================
`RECEIVED`               1/12    `wal`: messages received while the decoder is busy; with 1/8
                                 instead, peak memory is 40 MB higher
`HELD_MESSAGES`          1/8     `wal`: messages of incomplete transactions in the decoder, of
                                 8 MiB at most; more of them are returned as an open change set
`OPEN_TRANSACTIONS`      1/8     `wal`: messages that the server sends before their transaction
                                 commits; more of them go to disk
`POLLED`                 1/8     `polling`: rows of a poll
`POLLED_KEYS`            3/4     `polling`: hashes of the keys that a delete sweep compares
`SNAPSHOT_PAGES`         1/4     both: pages of all snapshot workers
=======================  ======  =============================================================

Of the memory of `verify`:

=======================  ======  =============================================================
`VERIFIED_PARTITION`     1/8     the rows of one partition, of source and lake
`VERIFIED_SPILL`         1/4     hashes that are not on disk yet, once for the source's rows
                                 and once for the changes
`LINKED_CHANGES`         1/2     changes whose keys changed, which are folded together
=======================  ======  =============================================================
"""

from __future__ import annotations

from fractions import Fraction

CONNECTOR = Fraction(1, 4)
EPOCH_BUFFER = Fraction(1, 6)
REFERENCE_BUFFER = Fraction(1, 8)
REFERENCE_FOLD = Fraction(1, 16)

RECEIVED = Fraction(1, 12)
HELD_MESSAGES = Fraction(1, 8)
OPEN_TRANSACTIONS = Fraction(1, 8)
POLLED = Fraction(1, 8)
POLLED_KEYS = Fraction(3, 4)
SNAPSHOT_PAGES = Fraction(1, 4)

VERIFIED_PARTITION = Fraction(1, 8)
VERIFIED_SPILL = Fraction(1, 4)
LINKED_CHANGES = Fraction(1, 2)


def bytes_of(share: Fraction, memory_bytes: int) -> int:
    """Return a share of so many bytes, rounded down."""
    return int(share * memory_bytes)


def source_bytes(memory_bytes: int, sources: int) -> int:
    """Return the share that each of so many sources has of `limits.memory`."""
    return memory_bytes // sources
