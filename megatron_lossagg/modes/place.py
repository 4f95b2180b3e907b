"""Where a mode was registered: whether a second registration is the first one, run again."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import CodeType, FrameType


@dataclass(frozen=True)
class Place:
    """A call in a module, a script, or a session without a file.

    Attributes:
        module: its name; "__main__" in a script or a notebook.
        file: its file; None in a notebook or an interpreter.
        code: the code that made the call.
        line: of the call.
    """

    module: str
    file: str | None
    code: CodeType
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> Place:
        """The line that a frame is at."""
        module, file = (frame.f_globals.get(name) for name in ("__name__", "__file__"))
        return cls(str(module), file, frame.f_code, frame.f_lineno)

    def is_replaced_by(self, other: Place) -> bool:
        """Whether `other` is this place, run again or edited and run again.

        A file is one place, whether it runs as `__main__`, is imported or reloaded; all cells of a
        notebook are. Two lines of one and the same run of it are two places.
        """
        if self._source != other._source:
            return False
        return self.code is not other.code or self.line == other.line

    @property
    def _source(self) -> str:
        return self.module if self.file is None else os.path.realpath(self.file)

    def __str__(self) -> str:
        return f"{self.module} ({self.file or 'no file'})"
