"""A process that has imported PyTorch ends with all it has to say, and without taking its modules apart.

An empty module stands for PyTorch, so that the processes start fast; the commands of other tests have PyTorch. They are
forks of a process that has imported what all need, each of which ends as Python does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import atexit, sys, threading, types
from pathlib import Path
from emrun.ranks import group
from emrun.ranks.process_end import end_process

class Kept:
    def __init__(self, word):
        self.word = word
    def __del__(self):
        write(self.word)

write = sys.stdout.write
"""
SERVER = """
import json, os, sys

for line in sys.stdin:
    place, output, errors, code = json.loads(line)
    pid = os.fork()
    if not pid:
        os.chdir(place)
        for number, file in ((0, os.devnull), (1, output), (2, errors)):
            os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
        os.closerange(3, 100)
        sys.argv = ["-c"]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    os._exit(0)
del json, os, line, place, output, errors, number, file, pid
exec(code)
"""
TORCH = "sys.modules['torch'] = types.ModuleType('torch')\n"
RANK = "group._has_joined = True\n"
APART = "kept = Kept('apart ')\n"


@pytest.fixture(scope="module")
def server():
    """Return a process that forks others, which run code."""
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    words = [sys.executable, "-c", BEGIN + SERVER]
    with subprocess.Popen(words, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def ended(tmp_path, server):
    """Run code in a Python process of its own, which then ends with status 3."""

    def run(code, begin=TORCH, output=tmp_path / "output"):
        errors = tmp_path / "errors"
        code = f"{begin}{code}\nend_process(3)\nsys.exit(3)"
        print(json.dumps([str(tmp_path), str(output), str(errors), code]), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        said = output.read_text() if output.is_file() else ""
        return subprocess.CompletedProcess(code, status, said, errors.read_text())

    return run


def test_the_modules_are_not_taken_apart(ended):
    done = ended(APART)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_without_pytorch_python_ends_as_usual(ended):
    done = ended(APART, begin="")
    assert (done.returncode, done.stdout, done.stderr) == (3, "apart ", "")


@pytest.mark.parametrize("begin", [TORCH, TORCH + RANK])
def test_exit_functions_are_called_in_reverse_order_and_what_they_write_is_there(begin, ended):
    done = ended("write('body '); atexit.register(write, 'last'); atexit.register(write, 'first ')", begin)
    assert (done.returncode, done.stdout, done.stderr) == (3, "body first last", "")


@pytest.mark.parametrize("begin", [TORCH, TORCH + RANK])
def test_a_thread_that_is_still_writing_is_waited_for(begin, ended, tmp_path):
    code = """
def work():
    threading.main_thread().join()
    with Path("late.txt").open("w") as file:
        for number in range(1000):
            print(number, file=file)
    write("written")

threading.Thread(target=work).start()
"""
    done = ended(code, begin)
    assert (done.returncode, done.stdout, done.stderr) == (3, "written", "")
    assert (tmp_path / "late.txt").read_text() == "".join(f"{number}\n" for number in range(1000))


@pytest.mark.parametrize("begin", [TORCH, TORCH + RANK])
def test_threads_of_a_pool_that_was_left_open_do_not_hang(begin, ended):
    code = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\npool.submit(write, 'done')"
    done = ended(code, begin)
    assert (done.returncode, done.stdout, done.stderr) == (3, "done", "")


def test_what_only_refers_to_itself_is_deleted(ended):
    done = ended("circle = Kept('deleted'); circle.circle = circle; del circle")
    assert (done.returncode, done.stdout, done.stderr) == (3, "deleted", "")


def test_where_a_file_is_still_open_python_closes_it(ended, tmp_path):
    code = """
import io

class Archive(io.TextIOWrapper):
    def close(self):
        if not self.closed:
            self.write(" and its end")
        super().close()

archive = Archive(open("left.txt", "wb"))
archive.write("all")
"""
    done = ended(code + APART)
    assert (done.returncode, done.stdout, done.stderr) == (3, "apart ", "")
    assert (tmp_path / "left.txt").read_text() == "all and its end"


def test_a_rank_writes_what_is_buffered_in_files_that_are_still_open(ended, tmp_path):
    code = "text = open('text.txt', 'w'); text.write('all')\nraw = open('raw.bin', 'wb'); raw.write(b'all')\n"
    done = ended(code + APART, TORCH + RANK)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
    assert (tmp_path / "text.txt").read_bytes() == (tmp_path / "raw.bin").read_bytes() == b"all"


def test_files_that_are_open_for_reading_keep_nothing_back(ended, tmp_path):
    (tmp_path / "read.txt").touch()
    assert ended(f"read = open('read.txt')\n{APART}").stdout == ""


def test_what_a_library_in_c_has_printed_is_there(ended):
    done = ended("import ctypes\nctypes.CDLL(None).printf(b'from C')")
    assert (done.returncode, done.stdout, done.stderr) == (3, "from C", "")


def test_output_that_cannot_be_written_is_an_error_as_python_has_it(ended):
    done = ended("write('lost')", output=Path("/dev/full"))
    assert done.returncode == 120
    assert "No space left on device" in done.stderr


def test_a_rank_whose_output_cannot_be_written_ends_with_its_status(ended):
    assert ended("write('lost')", TORCH + RANK, output=Path("/dev/full")).returncode == 3


def test_the_last_status_counts(ended):
    assert ended("end_process(5)").returncode == 3
