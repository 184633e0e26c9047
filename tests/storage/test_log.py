"""The log: what is written to it, and the root logger afterwards."""

import logging

import pytest

from emrun.base.errors import StorageError


@pytest.fixture
def root_logger():
    logger = logging.getLogger()
    state = logger.level, list(logger.handlers)
    yield logger
    logger.setLevel(state[0])
    assert logger.handlers == state[1]


def test_the_log_of_the_block_is_written(run, root_logger):
    root_logger.setLevel(logging.WARNING)
    logging.getLogger("my_hooks").info("before")
    with run.log:
        logging.getLogger("my_hooks").info("größe %d of %s", 3, "\udcff.png")  # a file name that is not UTF-8
        logging.getLogger("my_hooks").debug("too much")
    logging.getLogger("my_hooks").warning("after")
    (line,) = (run.directory / "train.log").read_text(encoding="utf-8").splitlines()
    assert line.endswith(r": INFO    @test_log      : größe 3 of \udcff.png")


def test_a_level_below_info_is_kept(run, root_logger):
    root_logger.setLevel(logging.DEBUG)
    with run.log:
        logging.getLogger("my_hooks").debug("much")
    assert "much" in (run.directory / "train.log").read_text()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_log_is_left_after_the_block(run, root_logger, fails):
    root_logger.setLevel(logging.ERROR)
    before = list(root_logger.handlers)
    try:
        with run.log:
            (handler,) = [each for each in root_logger.handlers if each not in before]
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert root_logger.handlers == before
    assert root_logger.level == logging.ERROR
    assert handler.stream is None  # its file is closed


def test_an_error_that_ends_the_block_is_in_the_log_with_its_traceback(run, root_logger):
    with pytest.raises(KeyError), run.log:
        raise KeyError("100 % of 'größe'")
    text = (run.directory / "train.log").read_text(encoding="utf-8")
    assert "Traceback (most recent call last):" in text
    assert "test_log.py" in text
    assert text.endswith("""KeyError: "100 % of 'größe'"\n""")


def test_two_blocks_write_one_after_the_other(run, root_logger):
    for number in range(2):
        with run.log:
            logging.getLogger("x").warning("block %d", number)
    assert [line[-1] for line in (run.directory / "train.log").read_text().splitlines()] == ["0", "1"]


def test_a_log_that_cannot_be_written_is_a_storage_error(run, root_logger):
    (run.directory / "train.log").mkdir()
    with pytest.raises(StorageError, match=r"cannot read .*train.log: it is not a regular file"), run.log:
        pass


def test_to_close_a_log_that_is_not_open_changes_nothing(run):
    run.log.close()
    with run.log:
        logging.getLogger("mine").warning("heard")
    assert "heard" in (run.directory / "train.log").read_text()
