"""What an episode is made of: named fields with a dtype and a shape per step.

A field is named by its *path* (a tuple of keys), so that ``("obs", "a.b")`` and ``("obs", "a", "b")`` stay two
fields. Dtypes are numpy's names. Everything here is a value; nothing holds data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ods_async.errors import SchemaMismatchError

__all__ = [
    "ANNOTATIONS",
    "PROVENANCE",
    "RECORDED",
    "EpisodeSchema",
    "FieldSpec",
    "Path",
    "path_text",
]

Path = tuple[str, ...]


def path_text(path: Path) -> str:
    """The path as people read it: keys joined by a slash, a slash inside a key doubled."""
    return "/".join(key.replace("/", "//") for key in path)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: its path, the numpy name of its dtype, its shape per step, and the value of padding (0 or -1)."""

    path: Path
    dtype: str
    shape: tuple[int, ...] = ()
    pad: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return np.dtype(self.dtype).itemsize

    @property
    def step_nbytes(self) -> int:
        """Bytes of one step of this field (0 for a zero-size shape)."""
        return self.itemsize * math.prod(self.shape)

    @property
    def text(self) -> str:
        """For messages: ``obs/qpos float32 [14]``."""
        return f"{path_text(self.path)} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class EpisodeSchema:
    """The ordered fields of an episode. No path may repeat or lie below another.

    Raises:
        SchemaMismatchError: two fields with one path, or a path that runs through another field.
    """

    fields: tuple[FieldSpec, ...]

    def __post_init__(self) -> None:
        seen = {field.path for field in self.fields}
        if len(seen) != len(self.fields):
            doubled = next(p for p in seen if sum(f.path == p for f in self.fields) > 1)
            raise SchemaMismatchError(
                f"field {path_text(doubled)} is named twice in the schema; give each field a path of its own",
                field=path_text(doubled),
                expected="one field",
                found="two",
            )
        for path in seen:
            for cut in range(1, len(path)):
                if path[:cut] in seen:
                    raise SchemaMismatchError(
                        f"{path_text(path[:cut])} is a field and cannot hold {path_text(path)} as well; rename one",
                        field=path_text(path),
                        expected="a path through groups only",
                        found=f"a path through the field {path_text(path[:cut])}",
                    )

    def __iter__(self) -> Iterator[FieldSpec]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def __contains__(self, path: Path) -> bool:
        return any(field.path == path for field in self.fields)

    def __getitem__(self, path: Path) -> FieldSpec:
        for field in self.fields:
            if field.path == path:
                return field
        raise KeyError(path_text(path))

    @property
    def step_nbytes(self) -> int:
        """Bytes of one step over all fields, without padding for alignment."""
        return sum(field.step_nbytes for field in self.fields)

    def __add__(self, other: tuple[FieldSpec, ...]) -> EpisodeSchema:
        return EpisodeSchema(self.fields + other)


# Every worker records these beside the environment's own ``obs/…`` and ``actions``.
RECORDED: Final = (
    FieldSpec(("rewards",), "float32"),
    FieldSpec(("terminated",), "bool"),
    FieldSpec(("truncated",), "bool"),
    FieldSpec(("continuity_id",), "int64", pad=-1),
)

# The broker derives these from lengths, segments and instructions when it publishes.
ANNOTATIONS: Final = (
    FieldSpec(("valid",), "bool"),
    FieldSpec(("episode_step",), "int64", pad=-1),
    FieldSpec(("segment_id",), "int64", pad=-1),
    FieldSpec(("segment_step",), "int64", pad=-1),
    FieldSpec(("segment_start",), "bool"),
    FieldSpec(("segment_end",), "bool"),
    FieldSpec(("segment_accepted",), "bool"),
    FieldSpec(("task_index",), "int64", pad=-1),
    FieldSpec(("subtask_index",), "int64", pad=-1),
)

# Added when provenance is on.
PROVENANCE: Final = (
    FieldSpec(("ods_run_id",), "int64", pad=-1),
    FieldSpec(("ods_episode_id",), "int64", pad=-1),
    FieldSpec(("ods_generation",), "int64", pad=-1),
    FieldSpec(("ods_frame_index",), "int64", pad=-1),
    FieldSpec(("ods_accepted_at_ns",), "int64", pad=-1),
    FieldSpec(("ods_published_at_monotonic_ns",), "int64", pad=-1),
)
