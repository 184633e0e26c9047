"""A process that has imported PyTorch and emrun, and becomes the installed command as often as it is asked to.

See the fixture `emrun`. What a command finds is what a new process would find, but imported already: the tests about
imports and starts give `env`, with which the fixture starts a new process.

Reads requests from those who connect to the socket that is its standard input: JSON with the command's arguments,
directory and environment, together with what are to be its standard output and error, and a socket that gets the pid
and later the exit status. Its arguments are further modules to import; a request may name more, with the socket of a
fork that has these too. A command with `--nproc` starts its ranks in processes that stand by, which are forked before
it begins: see `Rank`.
"""

import atexit
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import memory
import numpy as np
import parsing
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

SLOW = ("click", "ruamel.yaml", "safetensors.torch", "tabulate", "torch", "torch._dynamo", "tqdm")
"""What most commands import, but for emrun."""
PROGRAMS = ("emrun.sample_configs", "emrun.__main__")
"""What is not imported but run."""
USUAL = {
    "dataset": {"class": "Majority"},
    "model": {
        "module": {"class": "torch.nn.Sequential", "args": [{"class": "torch.nn.ReLU"}]},
        "loss": {"class": "torch.nn.BCEWithLogitsLoss"},
        "optimizer": {"class": "Adam"},
        "scheduler": {"class": "StepLR", "step_size": 1},
    },
    "hooks": ["ComputeStats", "LogVariables", "SaveBest", "ShowProgress", "StopAfter", "WriteCSV"],
}
"""A config whose check reads the sources that most checks read."""


def import_emrun():
    """Import the modules of emrun, and parse the sources that most checks of configs read."""
    import emrun

    for module in pkgutil.walk_packages(emrun.__path__, "emrun."):
        if not module.name.startswith(PROGRAMS):
            importlib.import_module(module.name)
    parsing.remember()
    from emrun.config.config import load_config
    from emrun.config.plan import check_statically

    path = list(sys.path)
    check_statically(load_config(USUAL), evaluations=True)
    sys.path[:] = path  # without the directory in which the tests were started
    compile_templates()
    calculate()


def compile_templates():
    """Compile the templates of the page of a run."""
    from emrun.runs.report.templates import environment

    templates = environment()
    for name in templates.list_templates(extensions=["html"]):
        templates.get_template(name)


def calculate():
    """Let PyTorch prepare what most models use; without gradients, which a fork could not calculate after this."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)  # as OMP_NUM_THREADS: threads would not be there after a fork
    with torch.no_grad():
        torch.zeros(1).detach()
        logits = functional.linear(torch.zeros(8, 4), torch.zeros(2, 4))
        functional.conv2d(torch.zeros(1, 1, 8, 8), torch.zeros(1, 1, 3, 3))
        functional.cross_entropy(logits, torch.zeros(8, dtype=torch.int64))


def prepare(modules):
    """Import modules, and make forks cheap."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    weakref.finalize._registry.clear()  # of operators of PyTorch, which each process would take out at its end
    if utils := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(utils.dump_compile_times)  # to a log that shows none: half the cost of a process that ends


def serve(listener, clients):
    """Fork a process for each request; return in these. A request for modules gets another server, which has them.

    Args:
        listener: the socket to which clients connect; None for a server that accepts no others.
        clients: sockets with requests. When all are closed, the server ends.
    """
    running = {}  # a descriptor that is readable when a process has ended -> its pid, and who waits for its status
    while True:
        readable, _, _ = select.select([*running, *clients, *([listener] if listener else [])], [], [])
        server = readable[0]
        if server in running:
            pid, client = running.pop(server)
            os.close(server)
            answer(client, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            client.close()
            continue
        if server is listener:
            clients.append(listener.accept()[0])
            continue
        message, descriptors, _, _ = socket.recv_fds(server, 1 << 20, 3)
        if not message:
            clients.remove(server)
            server.close()
            if clients or (listener and select.select([listener], [], [], 0)[0]):
                continue
            with suppress(ChildProcessError):
                while True:
                    os.wait()
            os._exit(0)
        request = json.loads(message)
        if "modules" in request:
            if not os.fork():
                close(listener, clients, running)
                listener, clients, running = None, [socket.socket(fileno=descriptors[0])], {}
                prepare(request["modules"])
            else:
                os.close(descriptors[0])
            continue
        *files, answers = descriptors
        pid = os.fork()
        if not pid:
            close(listener, clients, running)
            os.close(answers)
            for descriptor, place in zip(files, (1, 2), strict=True):
                os.dup2(descriptor, place)
                os.close(descriptor)
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            tempfile.tempdir = None  # which the environment says
            np.random.seed()
            if "COVERAGE_PROCESS_CONFIG" in os.environ:
                from emrun_contexts import begin, of_this_test

                begin(of_this_test())
            stand_by(request["ranks"])
            return request["arguments"]
        for descriptor in files:
            os.close(descriptor)
        client = socket.socket(fileno=answers)
        answer(client, pid)
        running[os.pidfd_open(pid)] = pid, client


def answer(client, number):
    """Tell a number, unless the test has ended."""
    with suppress(BrokenPipeError):
        client.send(str(number).encode())


def close(listener, clients, running):
    """Close what the server has open, in a process that it has forked."""
    for descriptor in running:
        os.close(descriptor)
    for each in (listener, *clients, *(client for _, client in running.values())):
        if each is not None:
            each.close()


class Rank(subprocess.Popen):
    """A process that stands by, as a child of the command, and becomes `python -P -c CODE ARGUMENTS`; or a new one."""

    standing_by: ClassVar = []

    def _execute_child(self, args, *others):
        if not self.standing_by:
            super()._execute_child(args, *others)
            return
        self.pid, channel = self.standing_by.pop()
        self._child_created = True
        files = [each if each >= 0 else place for place, each in ((1, others[12]), (2, others[14]))]
        with channel, suppress(BrokenPipeError):  # a test has killed it already
            socket.send_fds(channel, [json.dumps({"arguments": args, "env": others[5]}).encode()], files)


def stand_by(count):
    """Fork the processes in which a command starts its ranks."""
    for _ in range(count):
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        pid = os.fork()
        if not pid:
            ours.close()
            for _, other in Rank.standing_by:
                other.close()
            become_rank(theirs)
        theirs.close()
        Rank.standing_by.append((pid, ours))
    from emrun.launch import ranks

    ranks.Popen = subprocess_handler.Popen = Rank


def become_rank(channel):
    """Wait for the code and its arguments, and run it; or end with the command."""
    os.setsid()
    message, files, _, _ = socket.recv_fds(channel, 1 << 20, 2)
    if not message:
        os._exit(0)
    channel.close()
    for place, file in enumerate(files, 1):
        os.dup2(file, place)
        os.close(file)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["env"])
    _, *options = request["arguments"]
    while (option := options.pop(0)) not in ("-c", "-m"):
        pass
    program, *arguments = options
    sys.argv = [option, *arguments]
    sys.path[0] = str(Path.cwd()) if option == "-m" else ""
    if option == "-m":
        run(lambda: runpy.run_module(program, run_name="__main__", alter_sys=True))
    run(lambda: exec(program, {"__name__": "__main__"}))


def run(program):
    """Run a program as Python does, and end."""
    with Path(os.devnull).open("rb") as null:
        os.dup2(null.fileno(), 0)
    try:
        program()
    except SystemExit as ended:
        end(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        end(1)
    end(0)


def end(status):
    """End as Python does, but leave the modules as they are: to clear them takes as long as a short command."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        if not file.closed:
            file.flush()
    os._exit(status)


if __name__ == "__main__":
    prepare(SLOW)
    import_emrun()
    prepare(sys.argv[1:])
    memory.use_large_pages()
    for name in ("memory", "parsing"):  # which no run is to record, with the repository in which they are
        del sys.modules[name]
    sys.argv = serve(socket.socket(fileno=os.dup(0)), [])
    sys.path[0] = str(Path(sys.argv[0]).parent)
    run(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
