"""Fixtures for all tests: the installed command in a process of its own, and small configs."""

import compileall
import functools
import gc
import io
import itertools
import json
import logging
import multiprocessing
import os
import platform
import pty
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections import Counter
from contextlib import contextmanager, suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path

import _pytest.logging
import campaign
import memory
import parsing
import pytest
from _pytest.assertion import rewrite
from cpu_seconds import Meter, leave_to_campaigns, longest_first
from tabulate import tabulate

ROOT = Path(__file__).parent.parent
EMRUN = Path(sys.executable).with_name("emrun")
VISION = (ROOT / "tests" / "vision" / "site-packages", Path(sys.prefix) / "vision")
"""The folder that lets torchvision be imported, see there; and the folder that has torchvision."""
COMMANDS = frozenset(["emrun", "emrun_on_terminal", "warm"])  # fixtures that start the installed command
MANY = 1000  # tests that fork often enough to be worth a second of preparation
WHOLE_RUNS = ("tests/cli/", "tests/faults/", "tests/training/")

for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # as in a background job of a shell or under nohup
        signal.signal(number, handler)
multiprocessing.set_start_method("fork", force=True)  # Python's default before 3.14; tests name the other methods
os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: tests run side by side
os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # in workers: large pages where Linux gives them
if str(VISION[0]) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # for the processes that tests start
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *map(str, VISION)]))
sys.path.append(str(VISION[1]))
runpy.run_path(str(VISION[0] / "sitecustomize.py"))
parsing.remember()


@contextmanager
def caught_by_root(handler, level=None):
    """Log to a handler too; pytest would look at each of the thousands of loggers of libraries, six times a test."""
    root = logging.getLogger()
    before = root.level
    if level is not None:
        handler.setLevel(level)
        root.setLevel(min(before, level))
    root.addHandler(handler)
    try:
        yield handler
    finally:
        root.removeHandler(handler)
        if level is not None:
            root.setLevel(before)


_pytest.logging.catching_logs = caught_by_root
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:
    memory.move_temporary_directory()
    os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), "emrun-tests-cache"))  # and not that of the user


def pytest_addoption(parser):
    parser.addoption("--campaign", type=float, metavar="MINUTES", help="run many trials of tests/faults, for this time")
    parser.addoption("--cpu-seconds", metavar="FILE", help="write a table of the CPU seconds of the tests")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session):
    """Store the compiled tests; keep the garbage collector away from what was collected, in forks too."""
    stored, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = stored
        gc.freeze()  # garbage too: to look for what is left of the imports takes longer than to keep it
        gc.enable()
        if session.testscollected > MANY:
            memory.use_large_pages()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Sort the tests, and mark those that start the installed command, make whole runs or cause faults as slow."""
    if config.getoption("--cpu-seconds") is None:
        leave_to_campaigns(items)
    longest_first(items)
    for item in items:
        if not COMMANDS.isdisjoint(item.fixturenames) or item.nodeid.startswith(WHOLE_RUNS):
            item.add_marker("slow")
    if (minutes := config.getoption("--campaign")) is not None:
        campaign.plan(config, items, minutes)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable(report):
    """Send no names by which a test can be chosen of what has passed: they are most of what a worker reports."""
    data = yield
    if report.passed:
        data["keywords"] = {}
    return data


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """End a campaign when its time is over."""
    campaign.skip_if_over(item)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Compile emrun, so that its commands do not, where PYTHONDONTWRITEBYTECODE keeps them from storing the result."""
    config.pluginmanager.register(Meter(config), "cpu-seconds")
    if not IS_WORKER:
        config.option.basetemp = config.option.basetemp or memory.base_directory()
        compileall.compile_dir(ROOT / "emrun", quiet=1)
        if config.getoption("numprocesses", None):
            compile_tests(config)
        return
    if config.getoption("--campaign") is None:
        from hypothesis.internal.conjecture import providers

        providers._get_local_constants = lambda: providers._local_constants  # each worker would parse all of emrun
    if config.option.durations is None and config.option.xmlpath is None:
        report_less(config)


def compile_tests(config):
    """Compile the tests of a new clone as pytest does: each worker would compile all of them."""
    for path in ROOT.glob("tests/**/test_*.py"):
        compiled = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if rewrite._read_pyc(path, compiled) is None:
            compiled.parent.mkdir(exist_ok=True)
            digest, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, digest, compiled)


def report_less(config):
    """Report of a test that passed only this, not that it starts, is set up, torn down and ends: half of the messages.

    Nobody shows them, except for the options `--durations` and `--junit-xml`.
    """
    interactor = next(each for each in config.pluginmanager.get_plugins() if hasattr(each, "sendevent"))
    send = interactor.sendevent

    def send_less(name, **content):
        if name == "testreport":
            report = content["data"]
            says_more = report["when"] == "call" or report["outcome"] != "passed" or report["user_properties"]
        else:
            says_more = name not in ("logstart", "logfinish")
        if says_more:
            send(name, **content)

    interactor.sendevent = send_less


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(exitstatus):
    """Wait for the processes that others use too, and leave the files of tests that have failed until the next run."""
    for server, path in Warm.servers:
        server.wait()
        path.unlink(missing_ok=True)
    if not IS_WORKER and not exitstatus:
        memory.remove_temporary_directory()


def pytest_terminal_summary(terminalreporter, config):
    """Print how many trials of each fault were survived, after a campaign, and what it has not reached."""
    if config.getoption("--campaign") is None:
        return
    faults = {}
    for report in itertools.chain(*terminalreporter.stats.values()):
        for name, value in getattr(report, "user_properties", ()):
            if name == "fault" and report.when == "teardown":
                tally = faults.setdefault(value[0], Counter())
                tally.update({key: count for key, count in value[1].items() if isinstance(count, int)})
    columns = ("survived", "lost", "unreadable", "silent")
    rows = [
        [fault, sum(tally[key] for key in columns), *(tally[key] for key in columns)] for fault, tally in faults.items()
    ]
    rows.append(["all", *(sum(row[index] for row in rows) for index in range(1, len(columns) + 2))])
    versions = f"emrun {version('emrun')}, torch {version('torch')}, Python {platform.python_version()}"
    terminalreporter.section("faults")
    terminalreporter.write_line(f"{date.today()}, {versions}, {platform.system()} {platform.machine()}\n")
    terminalreporter.write_line(tabulate(rows, ["fault", "trials", *columns], tablefmt="github", intfmt=","))
    for fault, tally in faults.items():
        if (made := sum(tally[key] for key in columns)) < tally["planned"]:
            terminalreporter.write_line(f"{fault}: there was time for {made:,} of {tally['planned']:,} trials")
    if left := campaign.not_reached(terminalreporter.stats):
        terminalreporter.write_line(f"\n{len(left)} longer tests were not reached; another day has another order:")
        terminalreporter.write_line("\n".join(left))


def read_both(output, errors, timeout):
    """Return what comes from two pipes or terminals, until the other ends of both are closed."""
    parts = {output: [], errors: []}
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        for file in parts:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                try:
                    part = os.read(key.fd, 65536)
                except OSError:  # Linux: no process has the terminal open any more
                    part = b""
                parts[key.fileobj].append(part)
                if not part:
                    selector.unregister(key.fileobj)
    return [b"".join(each) for each in parts.values()]


def newest_source():
    """Return when a file of emrun was changed last, as a time."""
    folders = [folder for name in ("emrun", "hooks", "datasets") for folder in os.walk(ROOT / name)]
    paths = (f"{folder}{os.sep}{name}" for folder, _, names in folders for name in names if name.endswith(".py"))
    return max(map(os.path.getmtime, paths))


class Warm:
    """Runs the installed command in processes that have imported PyTorch and emrun, most of a short command."""

    servers = []  # noqa: RUF012 - the processes that this worker has started, each with its address

    def __init__(self, *modules, parent=None, group=None):
        """Import these modules too; as a fork of another `Warm`, whose modules are there already.

        Workers with the same `group` have one process.
        """
        self._modules, self._parent = modules, parent
        self._group = group or str(os.getpid())
        self._begin()

    def _begin(self):
        self._newest = newest_source()
        if self._parent is None:
            self._client = self._connected()
        else:
            self._client, server = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self._parent._renew()
            request = json.dumps({"modules": self._modules})
            socket.send_fds(self._parent._client, [request.encode()], [server.fileno()])
            server.close()

    def _connected(self):
        """Return a connection with the process that imports the modules, which the first worker starts for all."""
        shared = Path(tempfile.gettempdir(), f"warm-{self._group[:8]}-{self._newest:.3f}")  # such paths have a limit
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, suppress(FileExistsError):
                own = shared.with_name(f"{shared.name}-{os.getpid()}")
                server.bind(str(own))
                server.listen()
                try:
                    shared.hardlink_to(own)
                finally:
                    own.unlink()
                command = [sys.executable, ROOT / "tests" / "warm.py", *self._modules]
                process = subprocess.Popen(command, stdin=server, cwd=ROOT)  # a test may delete its directory
                self.servers.append((process, shared))
            client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                client.connect(str(shared))
            except ConnectionRefusedError:  # the workers that used it have ended
                client.close()
                shared.unlink(missing_ok=True)
            else:
                return client

    def _renew(self):
        if newest_source() > self._newest:
            self.end()
            self._begin()

    def run(self, arguments, cwd, timeout, ranks=0):
        """Return the finished process, as `subprocess.run` does; after the timeout, kill it and raise an error.

        At most `ranks` processes that train together are started without importing PyTorch.
        """
        status, *found = self.run_with(arguments, cwd, timeout, errors=os.pipe(), ranks=ranks)
        texts = ["".join(io.TextIOWrapper(io.BytesIO(each))) for each in found]
        return subprocess.CompletedProcess(arguments, status, *texts)

    def run_with(self, arguments, cwd, timeout, errors, env=None, ranks=0):
        """Return the exit status, standard output, and what comes from `errors`, both ends of a pipe or a terminal."""
        self._renew()
        request = {"arguments": arguments, "cwd": str(cwd), "env": {**os.environ, **(env or {})}, "ranks": ranks}
        answers, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # one pair per request: a test may end
        pipes = [os.pipe(), errors]
        socket.send_fds(self._client, [json.dumps(request).encode()], [*(pipe[1] for pipe in pipes), theirs.fileno()])
        theirs.close()
        for _, end in pipes:
            os.close(end)
        with answers, os.fdopen(pipes[0][0], "rb") as output, os.fdopen(errors[0], "rb", 0) as read:
            pid = int(answers.recv(64))
            try:
                found = read_both(output, read, timeout)
                status = int(answers.recv(64))
            except BaseException as error:
                with suppress(ProcessLookupError):  # the process may have ended, and only its children are late
                    os.kill(pid, signal.SIGKILL)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(arguments, timeout) from None
                raise
        return status, *found

    def end(self):
        """Let it end when no other worker uses it, whatever processes that a test forked have a copy of the socket."""
        self._client.shutdown(socket.SHUT_RDWR)
        self._client.close()


@pytest.fixture(scope="session", autouse=True)
def tests_are_not_recorded():
    """Count the modules of the tests as installed, and ask git nothing about the repository that they are in.

    All of them are imported, and each run in the process of a test would record all of them, with what has changed.
    """
    from emrun.storage.code import git
    from emrun.training import user_code

    user_code._INSTALLED = (*user_code._INSTALLED, str(ROOT / "tests").strip(os.sep))
    asked = git.is_in_repository
    for module in (git, user_code):
        module.is_in_repository = lambda directory: not directory.is_relative_to(ROOT) and asked(directory)


@pytest.fixture(scope="session", autouse=True)
def no_stacks_of_seeds():
    """Forget seeds of devices that are not there: PyTorch would keep each with its stack until they are."""
    torch = sys.modules.get("torch")
    for device in (torch.cuda, torch.xpu, torch.mtia) if torch else ():
        if not device.is_available():
            device.manual_seed_all = lambda seed: None


@pytest.fixture(scope="session", autouse=True)
def digits_are_read_once():
    """Read the file of the digits once for all trainings in the process of the tests."""
    digits = sys.modules.get("emrun.datasets.digits")
    if digits is not None:
        digits._load = functools.cache(digits._load)


@pytest.fixture(autouse=True)
def modules_of_one_test(tmp_path_factory):
    """Remove the modules that a test has written and imported: their files are deleted, and names may come again."""
    from emrun.base import censor

    temporary = (str(tmp_path_factory.getbasetemp()), f"{memory.DISK}{os.sep}{memory.PREFIX}")
    newest = next(reversed(sys.modules))
    yield
    for name in list(itertools.takewhile(lambda name: name != newest, reversed(sys.modules))):
        if str(getattr(sys.modules[name], "__file__", "")).startswith(temporary):
            del sys.modules[name]
    censor._REFERENCES.clear()  # those of the configs that the test has read
    os.environ.pop("TQDM_DISABLE", None)  # a quiet command sets it, in the process of a test too


@pytest.fixture
def patient(monkeypatch):
    """Wait for the end of a thread that reads ahead, however busy the machine is."""
    monkeypatch.setattr("emrun.streams.read_ahead._PATIENCE", 60)


@pytest.fixture
def on_disk():
    """Return an empty directory on a disk, for what differs on a file system in memory."""
    with tempfile.TemporaryDirectory(prefix=memory.PREFIX, dir=memory.DISK) as place:
        yield Path(place)


@pytest.fixture(scope="session")
def warm(request):
    """Return a `Warm`, which runs the installed command without importing PyTorch or scikit-learn."""
    is_measured = request.config.getoption("--cpu-seconds") is not None  # then each worker counts its own
    process = Warm("sklearn.datasets", group=None if is_measured else os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    yield process
    process.end()


@pytest.fixture(scope="session")
def warm_with_transformers(warm):
    """Return a `Warm` for commands with models of transformers, whose import takes most of them."""
    process = Warm("transformers.models.bert.modeling_bert", "peft", parent=warm)
    yield process
    process.end()


@pytest.fixture
def emrun(tmp_path, warm):
    """Run the installed command in `tmp_path`, or in `cwd`; return the finished process with its output as text."""

    def run(*arguments, cwd=tmp_path, env=None, timeout=250, ranks=0):
        """With `env`, start a new Python process, which imports PyTorch again; see `Warm.run` for `ranks`."""
        command = [str(EMRUN), *map(str, arguments)]
        if env is None:
            return warm.run(command, cwd, timeout, ranks)
        return subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run


@pytest.fixture
def emrun_here(tmp_path):
    """Run the command as `emrun`, but in this process: see here.py for what this is."""
    from here import run_here  # it imports PyTorch

    def run(*arguments, cwd=tmp_path):
        return run_here(arguments, cwd)

    return run


@pytest.fixture
def emrun_on_terminal(tmp_path, warm):
    """Run the installed command with standard error on a terminal; return exit status, output and terminal text."""

    def run(*arguments, env=None):
        terminal = pty.openpty()
        termios.tcsetwinsize(terminal[1], (24, 80))
        command = [str(EMRUN), *map(str, arguments)]
        status, output, text = warm.run_with(command, tmp_path, 250, terminal, {"TERM": "xterm", **(env or {})})
        return status, output.decode(), text.decode()

    return run


@pytest.fixture
def run_directory():
    """Return a function that finds the only run directory in a directory."""

    def find(root):
        (trace,) = Path(root).glob("*/trace.yaml")
        return trace.parent

    return find


@pytest.fixture
def doomed(tmp_path):
    """Return the directory of a project whose training fails in many ways, depending on its arguments."""
    shutil.copytree(ROOT / "tests" / "doomed", tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def no_hooks_of_steps():
    """No hook of the steps of all optimizers, which other tests in the process may have registered."""
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

    before = [(each, dict(each)) for each in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)]
    for hooks, _ in before:
        hooks.clear()
    yield
    for hooks, there in before:
        hooks.clear()
        hooks.update(there)
