"""The configuration: a TOML file, fully checked before anything starts (design section 4).

Sizes: MB is 10^6 bytes, MiB 2^20. A relative `lake.uri` is relative to the working directory of
the daemon; a relative `file:` path is relative to the folder of the config file.
"""

from __future__ import annotations

from ingestd.config.base import Secret, Section
from ingestd.config.daemon import (
    DEFAULT_TARGET_BYTES,
    CatalogSettings,
    EpochSettings,
    HttpSettings,
    LakeSettings,
    LimitSettings,
    LogSettings,
    MaintenanceSettings,
)
from ingestd.config.file import Config, load_config
from ingestd.config.sources import (
    DEFAULT_REFRESH_S,
    NO_CONTROLS,
    UNSTREAMED,
    SourceSettings,
    TableSettings,
)
from ingestd.config.table_patterns import included

__all__ = [
    "DEFAULT_REFRESH_S",
    "DEFAULT_TARGET_BYTES",
    "NO_CONTROLS",
    "UNSTREAMED",
    "CatalogSettings",
    "Config",
    "EpochSettings",
    "HttpSettings",
    "LakeSettings",
    "LimitSettings",
    "LogSettings",
    "MaintenanceSettings",
    "Secret",
    "Section",
    "SourceSettings",
    "TableSettings",
    "included",
    "load_config",
]
