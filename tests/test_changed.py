"""`make test-changed` runs the tests of changed packages and of those above them."""

import pytest
from changed import packages_above, what_may_break


def test_a_package_has_those_above_it_in_the_import_table():
    assert packages_above("cli") == {"cli"}
    assert packages_above("launch") == {"launch", "diagnosis", "cli"}
    assert packages_above("storage") >= {"storage", "loop", "models", "hooks", "training", "diagnosis", "cli", "faults"}
    assert "config" not in packages_above("storage")


def test_models_are_found_by_name_and_trained_by_the_tests_of_training():
    assert packages_above("models") >= {"models", "training", "cli", "faults"}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("emrun/cli/train.py", {"tests/cli"}),
        ("hooks/stop_after.py", {"tests/hooks", "tests/faults"}),
        ("datasets/digits.py", {"tests/datasets"}),
        ("tests/hooks/test_stop_after.py", {"tests/hooks"}),
        ("tests/test_wording.py", {"tests/test_wording.py"}),
        ("emrun/hook.py", {"tests"}),
        ("emrun/base/errors.py", {"tests"}),
        ("tests/conftest.py", {"tests"}),
        ("tests/doubles.py", {"tests"}),
        ("pyproject.toml", {"tests"}),
        ("benchmarks/step.py", set()),
    ],
)
def test_a_changed_file_has_its_tests(path, tests):
    assert what_may_break(path) == tests


def test_a_page_has_the_tests_of_the_pages():
    assert "tests/test_readme.py" in what_may_break("docs/guide/config.md") & what_may_break("benchmarks/README.md")
