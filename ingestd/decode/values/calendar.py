"""Texts of dates and timestamps beyond the range of Arrow or Spark.

They are formatted as by the server, with DateStyle ISO and TimeZone UTC. Source: PostgreSQL,
src/backend/utils/adt/datetime.c (EncodeDateOnly, EncodeDateTime); the proleptic Gregorian calendar.
"""

from __future__ import annotations

_US_PER_DAY = 86_400_000_000
_DAYS_PER_ERA = 146_097
_YEARS_PER_ERA = 400
_FROM_MARCH_0000 = 719_468
"""Days from 0000-03-01 to 1970-01-01."""


def date_text(days: int) -> str:
    """Return the text of a date, `days` after 1970-01-01."""
    year, month, day = _civil(days)
    return _year(year, f"-{month:02d}-{day:02d}")


def timestamp_text(us: int, zone: str) -> str:
    """Return the text of a timestamp, `us` after 1970-01-01. `zone`: its suffix (``+00``)."""
    days, rest = divmod(us, _US_PER_DAY)
    seconds, fraction = divmod(rest, 1_000_000)
    year, month, day = _civil(days)
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    if fraction:
        clock += f".{fraction:06d}".rstrip("0")
    return _year(year, f"-{month:02d}-{day:02d} {clock}{zone}")


def _year(year: int, rest: str) -> str:
    """Return a date's text. There is no year 0: it is 1 BC."""
    return f"{year:04d}{rest}" if year > 0 else f"{1 - year:04d}{rest} BC"


def _civil(days: int) -> tuple[int, int, int]:
    """Return year, month and day. Years begin in March here, so that the leap day is the last."""
    era, day_of_era = divmod(days + _FROM_MARCH_0000, _DAYS_PER_ERA)
    year_of_era = (
        day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096
    ) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month_from_march = (5 * day_of_year + 2) // 153
    day = day_of_year - (153 * month_from_march + 2) // 5 + 1
    month = (month_from_march + 2) % 12 + 1
    year = era * _YEARS_PER_ERA + year_of_era + (month <= 2)  # noqa: PLR2004 - January, February
    return year, month, day
