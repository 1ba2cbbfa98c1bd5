from __future__ import annotations

import threading
from typing import Any, NoReturn

import pytest
import zmq

from ods_async.transport.sockets import Hub, open_channel


@pytest.mark.parametrize("where", ["get", "set", "connect"])
def test_c21_ctrl_c_in_the_middle_of_making_a_channel_does_not_keep_the_hub_from_closing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """C21: at exit, a hub waited for ever for a socket that nobody knew of any more."""

    def interrupted(*args: Any) -> NoReturn:
        raise KeyboardInterrupt

    hub = Hub()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, where, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback keeps the socket alive
            open_channel(hub, "req", connect=["tcp://127.0.0.1:9"])
    closing = threading.Thread(target=hub.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    assert caught.type is KeyboardInterrupt
