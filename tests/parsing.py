"""Most of the check of a config is to parse the same sources of PyTorch and emrun, once in each process of a user."""

import ast
import functools


def remember():
    """Parse equal sources once; only the check of a config parses bytes."""
    parse = ast.parse
    remembered = functools.cache(parse)

    def parsed(source, *arguments, **named):
        is_plain = isinstance(source, bytes) and not arguments and not named
        return remembered(source) if is_plain else parse(source, *arguments, **named)

    ast.parse = parsed
