"""The load information of a 64-bit ELF file (System V ABI, chapters 4 and 5)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

PT_LOAD, PT_DYNAMIC, PT_GNU_STACK, PT_GNU_RELRO = 1, 2, 0x6474E551, 0x6474E552
DT_NEEDED, DT_STRTAB, DT_STRSZ, DT_RPATH, DT_RUNPATH = 1, 5, 10, 15, 29
DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1 = 24, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW = 8, 1
PF_X = 1


@dataclass(frozen=True)
class Elf:
    """`paths`: those of RPATH and RUNPATH; `names`: of dynamic symbols and libraries."""

    binds_now: bool
    has_relro: bool
    has_executable_stack: bool
    paths: list[bytes]
    names: set[bytes]


def is_elf(content: bytes) -> bool:
    return content[:5] == b"\x7fELF\x02"


def read_elf(content: bytes) -> Elf:
    order = "<" if content[5] == 1 else ">"
    (offset,) = struct.unpack_from(f"{order}Q", content, 32)
    size, count = struct.unpack_from(f"{order}HH", content, 54)
    segments = [
        struct.unpack_from(f"{order}IIQQQQ", content, offset + i * size) for i in range(count)
    ]
    [dynamic] = [s for s in segments if s[0] == PT_DYNAMIC]
    entries = list(struct.iter_unpack(f"{order}QQ", content[dynamic[2] : dynamic[2] + dynamic[5]]))
    found = dict(entries)

    def in_file(address: int) -> int:
        [segment] = [s for s in segments if s[0] == PT_LOAD and s[3] <= address < s[3] + s[5]]
        return int(segment[2]) + address - int(segment[3])

    start = in_file(found[DT_STRTAB])
    texts = content[start : start + found[DT_STRSZ]]
    paths = [
        texts[value:].split(b"\0", 1)[0] for tag, value in entries if tag in {DT_RPATH, DT_RUNPATH}
    ]
    return Elf(
        binds_now=DT_BIND_NOW in found
        or bool(found.get(DT_FLAGS, 0) & DF_BIND_NOW or found.get(DT_FLAGS_1, 0) & DF_1_NOW),
        has_relro=any(s[0] == PT_GNU_RELRO for s in segments),
        has_executable_stack=any(s[0] == PT_GNU_STACK and s[1] & PF_X for s in segments),
        paths=paths,
        names=set(texts.split(b"\0")),
    )
