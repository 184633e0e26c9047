"""A process that has imported PyTorch, and becomes the installed command as often as it is asked to: see `emrun`.

Reads requests from the socket that is its standard input: JSON with the command's arguments, directory and environment,
together with what are to be its standard output and error, and a socket that gets the pid and later the exit status.
Its arguments are further modules to import.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

# what most commands import, but for emrun itself, which is imported as the command does it
SLOW = ("click", "ruamel.yaml", "safetensors.torch", "tabulate", "torch", "torch._dynamo", "tqdm")


def serve(server):
    """Fork a process for each request; return in these."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            os._exit(0)
        request = json.loads(message)
        *files, answers = descriptors
        pid = os.fork()
        if not pid:
            server.close()
            os.close(answers)
            for descriptor, place in zip(files, (1, 2), strict=True):
                os.dup2(descriptor, place)
                os.close(descriptor)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            np.random.seed()
            return request["arguments"]
        for descriptor in files:
            os.close(descriptor)
        with socket.socket(fileno=answers) as client, suppress(BrokenPipeError):  # the test has ended
            client.send(str(pid).encode())
            client.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def end(status):
    """End as Python does, but leave the modules as they are: to clear them takes as long as a short command."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()
    os._exit(status)


if __name__ == "__main__":
    for name in (*SLOW, *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()
    sys.argv = serve(socket.socket(fileno=os.dup(0)))
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        end(ended.code or 0)
    end(0)
