"""Runs small scripts, each in a fork of this process, and says how each ended: ``{name: [code, seconds, stderr]}``.

Reads ``[[name, script], …]`` from its input. The imports, which take most of a script's time, are made once. A script
ends as a program does: at its last line, by an exception or by ``sys.exit``. Its end is the end of all that it started:
whoever is left over holds its stderr open. Where a script prints ``waiting``, it gets Ctrl-C.
"""

import asyncio
import gc
import json
import os
import selectors
import signal
import sys
import time

from torch.utils.data import DataLoader

import ods_async as ods

SECONDS = 40.0
HERE = {
    "ods": ods,
    "sys": sys,
    "asyncio": asyncio,
    "DataLoader": DataLoader,
    "Unreachable": ods.BrokerUnreachableError,
    "Client": ods.Client,
    "AsyncClient": ods.AsyncClient,
    "EventSubscriber": ods.EventSubscriber,
    "OnlineDataset": ods.OnlineDataset,
}
scripts = json.load(sys.stdin)
running = {}
ended = {}
gc.freeze()

while scripts or running:
    if scripts and len(running) < 4:
        name, script = scripts.pop(0)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(writer, 2)
            os.closerange(3, 1024)  # its siblings' among them: their ends are to be seen
            exec(compile(script, name, "exec"), dict(HERE))
            break
        os.close(writer)
        running[reader] = [name, pid, time.monotonic(), b""]
        continue
    with selectors.DefaultSelector() as selector:
        for reader in running:
            selector.register(reader, selectors.EVENT_READ)
        ready = [key.fd for key, _ in selector.select(1.0)]
    for reader, (name, pid, began, said) in list(running.items()):
        piece = os.read(reader, 65_536) if reader in ready else None
        if piece:
            running[reader][3] += piece
            if piece.startswith(b"waiting"):
                os.kill(pid, signal.SIGINT)
        elif piece is None and time.monotonic() - began > SECONDS:
            running[reader][3] += b" [never ended]"
            os.kill(pid, signal.SIGKILL)
        if piece == b"":
            os.close(reader)
            del running[reader]
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended[name] = [code, time.monotonic() - began, said.decode(errors="replace")]
else:
    json.dump(ended, sys.stdout)
