"""The directories from which the user's modules are imported."""

import sys

import pytest

from emrun.base.user_modules import find_user_modules, user_directories


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    """The path of Python's modules alone, and a current directory that is not on it."""
    monkeypatch.setattr(sys, "path", ["/python"])
    monkeypatch.chdir(tmp_path)
    return sys.path


def test_modules_are_found_in_a_directory_and_then_in_the_current_one(path, tmp_path):
    find_user_modules("/code")
    assert path == ["/python", "/code", str(tmp_path)]


def test_a_directory_that_is_on_the_path_stays_where_it_is(path, tmp_path):
    path.append("/there")
    find_user_modules("/there")
    find_user_modules()
    assert path == ["/python", "/there", str(tmp_path)]


def test_the_users_directories_are_those_at_the_end_of_the_path(path, tmp_path):
    assert user_directories() == []
    find_user_modules("/code")
    assert user_directories() == ["/code", str(tmp_path)]
    path.append("/added/later")
    assert user_directories() == []
