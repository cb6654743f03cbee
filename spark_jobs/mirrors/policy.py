"""The sizes by which `job.py` chooses how a mirror is changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MirrorPolicy:
    """The limits between the ways to change a mirror. Rows and bytes are the raw ones of a step.

    `few_rows`, `few_bytes`: steps up to this size are folded in the driver. `driver_rows`,
    `driver_bytes`: steps up to this size are tried in the driver.

    In the driver: files below `small_file_bytes` are rewritten; if a mirror has more of them than
    `most_small_files`, they are rewritten as one. So are files of which more than one row in
    `file_changed_share` is deleted or changes. `read_file_bytes`, `read_memory_bytes`: limits on
    reading, as bytes of files, and as memory of their rows.

    By Spark: a mirror below `small_bytes` is rewritten, which is faster than to find the rows that
    change; so is one most of whose rows change. Changes above 1/`changed_share` of a mirror's size
    count as most of its rows, since a mirror is compressed.
    """

    few_rows: int = 50_000
    few_bytes: int = 64 << 20
    driver_rows: int = 2_000_000
    driver_bytes: int = 256 << 20
    small_file_bytes: int = 4 << 20
    most_small_files: int = 16
    read_file_bytes: int = 128 << 20
    read_memory_bytes: int = 512 << 20
    file_changed_share: int = 4
    small_bytes: int = 4 << 20
    changed_share: int = 3


DEFAULT_POLICY = MirrorPolicy()
