"""What each process of a user reads or writes once, and the tests in one process a thousand times, is remembered.

Most of the check of a config is to read the same sources of PyTorch and emrun; a tenth of a short run is to write YAML.
"""

import ast
import functools
from types import FunctionType

from emrun.config import yaml_text, yaml_tree
from emrun.config.source_finder import Unimported
from emrun.storage import trace

LOOKUP = Unimported._lookup
"""What a new process has: it knows nothing of what other tests have found."""


def remember():
    """Parse equal sources and equal texts of YAML once, and find what a config names in emrun or PyTorch once.

    Write equal trees, and equal entries of traces, once too.
    """
    parse, lookup, found = ast.parse, Unimported._lookup, {}
    remembered = functools.cache(parse)

    def parsed(source, *arguments, **named):
        is_plain = isinstance(source, bytes) and not arguments and not named  # only the check of a config parses bytes
        return remembered(source) if is_plain else parse(source, *arguments, **named)

    def looked_up(self, path):
        is_inner = getattr(self, "looks_up", False)  # the answer may depend on the outer path, in a cycle
        if path in found and not is_inner:
            return found[path]
        self.looks_up = True
        try:
            what = lookup(self, path)
        finally:
            self.looks_up = is_inner
        if not is_inner and path.startswith(("emrun.", "torch.")) and isinstance(what, type | FunctionType):
            found[path] = what
        return what

    document = yaml_tree._Parser.document
    read = functools.lru_cache(1000)(lambda text, source: document(yaml_tree._Parser(text, source)))
    ast.parse, Unimported._lookup = parsed, looked_up
    yaml_tree._Parser.document = lambda self: read(self._text, self._source)
    remember.read = read
    remember_texts(yaml_text, "_write")
    text_of = remember_texts(trace, "_as_yaml")
    trace._as_yaml = lambda entries: "".join(text_of({name: value}) for name, value in entries.items())


def remember_texts(module, name):
    """Let a function of a module, which returns the text of plain values, write equal values once; return it."""
    write = getattr(module, name)
    texts = {}

    def text_of(plain):
        shown = repr(plain)
        if shown not in texts:
            texts[shown] = write(plain)
        return texts[shown]

    setattr(module, name, text_of)
    return text_of
