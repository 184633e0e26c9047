"""`emrun.export`: what is refused before anything is built."""

import pytest

import emrun
from emrun.errors import UsageError


def test_a_format_that_does_not_exist_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="there is no format 'onx'; did you mean 'onnx'"):
        emrun.export(tmp_path, to="onx")


def test_a_directory_that_is_not_a_run_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="not a run"):
        emrun.export(tmp_path, to="onnx")
