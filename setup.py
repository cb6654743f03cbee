"""How `ingestd/decode/_native.c` is compiled, hardened; and what keeps two builds the same bytes.

All else is in pyproject.toml. A flag that the compiler or the linker does not know is left out: on
macOS the linker has no `-z`, and binds and protects as that asks for in any case.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

COMPILE = (
    "-fstack-protector-strong",
    "-fstack-clash-protection",
    "-g0",
    f"-ffile-prefix-map={os.getcwd()}=.",  # noqa: PTH109 - the text that compilers compare with
)
FORTIFY = ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
LINK = ("-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack")
RPATHS = ("-Wl,-rpath", "-Wl,-R", "-Wl,--enable-new-dtags", "-R")


class HardenedBuild(build_ext):
    """Adds the flags, and removes the builder's folders: no library is loaded from there."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension."""
        if self.compiler.compiler_type == "unix":
            for name in ("linker_so", "linker_so_cxx"):
                words = getattr(self.compiler, name, None) or []
                setattr(self.compiler, name, [w for w in words if not w.startswith(RPATHS)])
            self.compiler.runtime_library_dirs = []
            for flag in COMPILE:
                if self._works(flag):
                    ext.extra_compile_args.append(flag)
            # the macros check nothing without optimisation
            if not any(word.startswith("-O") for word in self.compiler.compiler_so):
                ext.extra_compile_args.append("-O2")
            ext.extra_compile_args += FORTIFY
            ext.extra_link_args += [flag for flag in LINK if self._works(flag, links=True)]
        super().build_extension(ext)

    def _works(self, flag: str, *, links: bool = False) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "empty.c"
            source.write_text("int ingestd_empty;\n", encoding="ascii")
            try:
                # clang only warns of what it does not know
                compiled = ["-Werror"] if links else ["-Werror", flag]
                objects = self.compiler.compile([str(source)], folder, extra_postargs=compiled)
                if links:
                    target = Path(folder) / "empty.so"
                    self.compiler.link_shared_object(objects, str(target), extra_postargs=[flag])
            except CCompilerError:
                return False
        return True


class SameWheel(bdist_wheel):
    """Gives files the same permissions, whatever umask they were checked out and built with."""

    def write_wheelfile(self, *args: str, **options: str) -> None:
        """Write the last file that goes into the wheel."""
        super().write_wheelfile(*args, **options)
        for path in Path(self.bdist_dir).rglob("*"):
            if path.is_file():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)


setup(cmdclass={"build_ext": HardenedBuild, "bdist_wheel": SameWheel})
