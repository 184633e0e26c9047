"""A process that has imported PyTorch ends with all it has to say, and without taking its modules apart.

An empty module stands for PyTorch, so that the processes start fast; the commands of other tests have PyTorch.
"""

import gzip
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
TORCH = "sys.modules['torch'] = types.ModuleType('torch')\n"
RANK = "group._has_joined = True\n"
APART = "kept = Kept('apart ')\n"


@pytest.fixture
def ended(tmp_path):
    """Run code in a new Python process, which then ends with status 3."""

    def run(code, begin=TORCH, output=subprocess.PIPE):
        words = [sys.executable, "-c", f"{BEGIN}{begin}{code}\nend_process(3)\nsys.exit(3)"]
        env = {**os.environ, "PYTHONUNBUFFERED": ""}
        return subprocess.run(
            words, cwd=tmp_path, env=env, text=True, stdout=output, stderr=subprocess.PIPE, check=False
        )

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
    code = "import gzip\narchive = gzip.open('left.gz', 'wt'); archive.write('all')\n"
    done = ended(code + APART)
    assert (done.returncode, done.stdout, done.stderr) == (3, "apart ", "")
    assert gzip.decompress((tmp_path / "left.gz").read_bytes()) == b"all"


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
    with Path("/dev/full").open("w") as full:
        done = ended("write('lost')", output=full)
    assert done.returncode == 120
    assert "No space left on device" in done.stderr


def test_a_rank_whose_output_cannot_be_written_ends_with_its_status(ended):
    with Path("/dev/full").open("w") as full:
        assert ended("write('lost')", TORCH + RANK, output=full).returncode == 3


def test_the_last_status_counts(ended):
    assert ended("end_process(5)").returncode == 3
