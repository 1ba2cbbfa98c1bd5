"""What is drawn: sizes of the workloads, and the brokers that hold them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ods_async.core.episode import recorded_schema
from ods_async.core.memory import BatchLayout
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, FieldSpec

SMALL = (
    FieldSpec(("obs", "qpos"), "float32", (14,)),
    FieldSpec(("obs", "qvel"), "float32", (14,)),
    FieldSpec(("actions",), "float32", (14,)),
)
IMAGE = (*SMALL, FieldSpec(("obs", "image"), "uint8", (96, 96, 3)))
CAMERAS = (*SMALL, *(FieldSpec(("obs", name), "uint8", (224, 224, 3)) for name in ("left", "right", "wrist")))


@dataclass(frozen=True)
class Workload:
    """``batch`` windows of ``chunk`` steps out of ``slots`` episodes of ``steps`` steps, ``num_envs`` made at once."""

    name: str
    fields: tuple[FieldSpec, ...]
    batch: int
    chunk: int
    slots: int
    steps: int
    num_envs: int
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def provenance(self) -> bool:
        return bool(self.settings.get("include_provenance"))

    @property
    def layout(self) -> BatchLayout:
        schema = recorded_schema(self.fields) + ANNOTATIONS + (PROVENANCE if self.provenance else ())
        return BatchLayout.of(schema, self.batch, self.chunk, context=False)

    @property
    def rollout_bytes(self) -> int:
        return recorded_schema(self.fields).step_nbytes * self.steps * self.num_envs

    def described(self) -> dict[str, Any]:
        return {
            "fields": len(self.layout.fields),
            "batch": self.batch,
            "chunk": self.chunk,
            "batch_bytes": self.layout.nbytes,
            "slots": self.slots,
            "steps": self.steps,
            "num_envs": self.num_envs,
            "rollout_bytes": self.rollout_bytes,
            **self.settings,
        }


BUDGET = {"include_provenance": True, "episode_sample_budget": 2**40, "episode_sample_hard_limit": 2**41}

WORKLOADS = {
    work.name: work
    for work in (
        Workload("S", SMALL, 64, 32, 64, 256, 16),
        Workload("S budget", SMALL, 64, 32, 64, 256, 16, BUDGET),
        # One rollout of 57 MB, as of workload I, but of small fields only.
        Workload("S big rollouts", SMALL, 64, 32, 64, 4896, 64),
        Workload("I", IMAGE, 64, 32, 32, 128, 16),
        Workload("V", CAMERAS, 16, 16, 8, 64, 4),
        *(Workload(f"S rows {rows}", SMALL, 64, 32, rows, 64, min(rows, 256)) for rows in (64, 1024, 4096, 65536)),
    )
}
