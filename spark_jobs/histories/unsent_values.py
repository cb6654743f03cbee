"""Values that updates did not send (unchanged TOAST), filled in from earlier versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window as Over
from pyspark.sql import functions as f

from ingestd.model.changes import OF_BEFORE
from spark_jobs.delta_log.tables import is_connect
from spark_jobs.histories.shape import UNCHANGED, HistoryShape
from spark_jobs.histories.version_columns import kept_raw
from spark_jobs.histories.window import BEFORE, Window, old_columns
from spark_jobs.lake.columns import RAW, col, with_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_POSITION = ("_cdc_lsn", "_cdc_seq")


def filled(events: DataFrame, window: Window, shape: HistoryShape) -> DataFrame:
    """Return events with unsent values filled in; `_cdc_unchanged` names those still unknown.

    A row whose key changed gets them from its old key, through any number of keys, one round per
    key. If the window has more than one such update, each round costs a Spark job.
    """
    names = window.unsent
    fields = old_columns(events)
    events = with_columns(
        events,
        {_known(i): _sent(n, shape, is_in_before=n in fields) for i, n in enumerate(names)},
    )
    filled_events = _fill_forward(events, shape, names)
    if window.moves_unsent:
        filled_events = _through_keys(events, shape, window)
    unknown = f.array_compact(
        f.array(*(f.when(~_is_known(i), f.lit(n)) for i, n in enumerate(names)))
    )
    has_unsent = f.size(f.array_intersect(f.coalesce(UNCHANGED, f.array()), _texts(names))) > 0
    others = f.array_except(f.coalesce(UNCHANGED, f.array()), _texts(names))
    still = f.concat(others, unknown)
    texts = [(n, f.col(_known(i))["text"]) for i, n in enumerate(names)]
    return filled_events.withColumns(
        {
            **{n: f.col(_known(i))["value"] for i, n in enumerate(names)},
            RAW: f.when(has_unsent, kept_raw(f.col(RAW), texts=texts)).otherwise(f.col(RAW)),
            UNCHANGED: f.when(f.size(still) > 0, still),
        }
    ).drop(*map(_known, range(len(names))))


def _known(number: int) -> str:
    return f"_cdc_known{number}"


def _is_known(number: int) -> Column:
    return f.coalesce(f.col(_known(number))["known"], f.expr("false"))


def _texts(names: tuple[str, ...]) -> Column:
    return f.array(*map(f.lit, names))


def _value(known: Column, value: Column, text: Column) -> Column:
    return f.struct(known.alias("known"), value.alias("value"), text.alias("text"))


def _sent(name: str, shape: HistoryShape, *, is_in_before: bool) -> Column:
    """Return an event's value of a column; null if the value of the event before applies."""
    is_unsent = f.coalesce(f.array_contains(UNCHANGED, name), f.expr("false"))
    own = _value(f.expr("true"), col(name), f.try_element_at(f.col(RAW), f.lit(name)))
    nothing = _value(
        f.expr("false"), f.lit(None).cast(shape.types[name]), f.lit(None).cast("string")
    )
    found = f.when(f.col("_cdc_kind") == "x", None).when(~is_unsent, own)
    if is_in_before:
        old = f.col(BEFORE).getField(name)
        text = f.try_element_at(f.col("_cdc_sent_raw"), f.lit(OF_BEFORE + name))
        found = found.when(old.isNotNull() | text.isNotNull(), _value(f.expr("true"), old, text))
    # another row's values are not this one's
    is_first = f.col("_cdc_moved") | (f.col("_cdc_kind") == "b")
    return found.when(is_first, nothing)


def _fill_forward(events: DataFrame, shape: HistoryShape, names: tuple[str, ...]) -> DataFrame:
    over = (
        Over.partitionBy(*shape.part_names)
        .orderBy(*_POSITION)
        .rowsBetween(Over.unboundedPreceding, Over.currentRow)
    )
    return with_columns(
        events,
        {_known(i): f.last(_known(i), ignorenulls=True).over(over) for i in range(len(names))},
    )


def _through_keys(events: DataFrame, shape: HistoryShape, window: Window) -> DataFrame:
    names = window.unsent
    known, before = events, -1
    for rounds in range(1, window.moves_unsent + 1):
        old_rows = (
            _fill_forward(known, shape, names)
            .where(f.col("_cdc_kind") == "x")
            .select(
                *_POSITION, *(f.col(_known(i)).alias(f"_cdc_old{i}") for i in range(len(names)))
            )
        )
        known = _joined(events, old_rows, len(names))
        if window.moves_unsent == 1:
            break
        old_rows = _kept(old_rows)
        known = _joined(events, old_rows, len(names))
        found = old_rows.agg(
            *(f.count_if(f.col(f"_cdc_old{i}")["known"]).alias(str(i)) for i in range(len(names)))
        ).first()
        assert found is not None
        if sum(found) == before or rounds == window.moves_unsent:
            break
        before = sum(found)
    return _fill_forward(known, shape, names)


def _kept(rows: DataFrame) -> DataFrame:
    """Return the rows without their plan, which grows; as they are on Spark Connect.

    (There, Spark 4 makes them rows of the first session, not of the job's, and 3.5 has no call.)
    """
    return rows if is_connect(rows.sparkSession) else rows.localCheckpoint(eager=False)


def _joined(events: DataFrame, old_rows: DataFrame, count: int) -> DataFrame:
    """Return the events, with the values of their old keys in rows that moved."""
    columns = [n for n in events.columns if n not in {_known(i) for i in range(count)}]
    found = events.join(old_rows, [*_POSITION], "left")
    has_moved = f.col("_cdc_moved")
    return found.select(
        *(col(n) for n in columns),
        *(
            f.when(has_moved & ~_is_known(i), f.coalesce(f.col(f"_cdc_old{i}"), f.col(_known(i))))
            .otherwise(f.col(_known(i)))
            .alias(_known(i))
            for i in range(count)
        ),
    )
