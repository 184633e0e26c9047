"""Objects that a config names are found by importing them."""

import pytest

from emrun.config.import_finder import locate


def test_a_submodule_is_imported_when_a_path_names_it():
    assert locate("xml.dom.minidom.parseString").__name__ == "parseString"


def test_a_name_below_a_module_that_is_not_a_package_is_missing():
    with pytest.raises(LookupError, match=r"json\.decoder .*has no 'nope'"):
        locate("json.decoder.nope.Thing")


def test_a_class_of_a_script_is_missing_with_what_to_do():
    with pytest.raises(LookupError, match=r"__main__\.Mine: only the script .* move Mine to a module of yours"):
        locate("__main__.Mine")
