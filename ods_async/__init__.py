"""Fresh robot demonstrations, streamed from simulators to trainers.

The public names are below. Each is imported when it is first used, so that broker and worker processes, and whoever
only watches, never wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ods_async.version import __version__

if TYPE_CHECKING:
    from ods_async.broker.service import Broker
    from ods_async.client.aio import AsyncClient
    from ods_async.client.chunk_sizes import ChunkSizeSampler, GMMChunkSampler, UniformChunkSampler
    from ods_async.client.dataset import OnlineDataset
    from ods_async.client.sync import Client
    from ods_async.config import OnlineDataEngineCfg
    from ods_async.core.language import SharedLanguageRegistry
    from ods_async.core.states import OnlineDataEngineState
    from ods_async.engine import AsyncOnlineDataEngine, OnlineDataEngine
    from ods_async.errors import (
        ArgumentError,
        AuthenticationError,
        BrokerUnreachableError,
        ClosedError,
        ConfigError,
        DataUnavailableError,
        EndpointError,
        EndpointInUseError,
        ForcedShutdownError,
        LanguageCapacityError,
        LimitExceededError,
        MisuseError,
        OdsError,
        OnlineDataBudgetExhaustedError,
        OnlineDataWorkerError,
        OwnerOnlyError,
        PeerError,
        ProtocolError,
        RequestTimeoutError,
        RolloutRefusedError,
        RunChangedError,
        SchemaMismatchError,
        SessionLostError,
        SharedMemoryError,
        StartCancelledError,
        StateError,
        WorkerExitedError,
    )
    from ods_async.observe.subscriber import EventsLost, EventSubscriber
    from ods_async.transport.allocator import keep_big_blocks
    from ods_async.transport.curve import CurveKeys
    from ods_async.wire.errors import register_error
    from ods_async.worker.demonstration import DemoEpisodeResult, DemoSegment, execute_demo_episode
    from ods_async.worker.runtime import Worker

__all__ = [
    "ArgumentError",
    "AsyncClient",
    "AsyncOnlineDataEngine",
    "AuthenticationError",
    "Broker",
    "BrokerUnreachableError",
    "ChunkSizeSampler",
    "Client",
    "ClosedError",
    "ConfigError",
    "CurveKeys",
    "DataUnavailableError",
    "DemoEpisodeResult",
    "DemoSegment",
    "EndpointError",
    "EndpointInUseError",
    "EventSubscriber",
    "EventsLost",
    "ForcedShutdownError",
    "GMMChunkSampler",
    "LanguageCapacityError",
    "LimitExceededError",
    "MisuseError",
    "OdsError",
    "OnlineDataBudgetExhaustedError",
    "OnlineDataEngine",
    "OnlineDataEngineCfg",
    "OnlineDataEngineState",
    "OnlineDataWorkerError",
    "OnlineDataset",
    "OwnerOnlyError",
    "PeerError",
    "ProtocolError",
    "RequestTimeoutError",
    "RolloutRefusedError",
    "RunChangedError",
    "SchemaMismatchError",
    "SessionLostError",
    "SharedLanguageRegistry",
    "SharedMemoryError",
    "StartCancelledError",
    "StateError",
    "UniformChunkSampler",
    "Worker",
    "WorkerExitedError",
    "__version__",
    "execute_demo_episode",
    "keep_big_blocks",
    "register_error",
]

_HOMES = {
    "AsyncClient": "client.aio",
    "AsyncOnlineDataEngine": "engine",
    "Broker": "broker.service",
    "ChunkSizeSampler": "client.chunk_sizes",
    "Client": "client.sync",
    "CurveKeys": "transport.curve",
    "DemoEpisodeResult": "worker.demonstration",
    "DemoSegment": "worker.demonstration",
    "EventSubscriber": "observe.subscriber",
    "EventsLost": "observe.subscriber",
    "GMMChunkSampler": "client.chunk_sizes",
    "OnlineDataEngine": "engine",
    "OnlineDataEngineCfg": "config",
    "OnlineDataEngineState": "core.states",
    "OnlineDataset": "client.dataset",
    "SharedLanguageRegistry": "core.language",
    "UniformChunkSampler": "client.chunk_sizes",
    "Worker": "worker.runtime",
    "execute_demo_episode": "worker.demonstration",
    "keep_big_blocks": "transport.allocator",
    "register_error": "wire.errors",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
