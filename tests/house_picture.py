"""Draws the packages of emrun and their imports, as docs/about/architecture.md shows them.

    python tests/house_picture.py [--write]

Prints a Mermaid graph and a table, both made of the imports in the code; `--write` puts them into the page.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from test_house import MAY_IMPORT, ROOT, ROOT_PACKAGE, house, imports_within

PAGE = ROOT / "docs" / "about" / "architecture.md"
BEGIN, END = "<!-- drawn by tests/house_picture.py -->\n", "<!-- end of the drawing -->\n"
FOUND_BY_NAME = ("models", "hooks", "datasets")


def packages():
    """Return package -> the other packages that its modules import."""
    modules = house(ROOT)
    needs = {}
    for name, imported in imports_within(ROOT).items():
        own = modules[name][0]
        needs.setdefault(own, set()).update({modules[other][0] for other in imported} - {own})
    return needs


def direct(needs):
    """Return the pairs of packages of which the first imports the second, and no third one between them does."""
    return [
        (one, other)
        for one, others in needs.items()
        for other in sorted(others)
        if not any(other in needs[between] for between in others - {other})
    ]


def node(package):
    return "root" if package == ROOT_PACKAGE else package


def listed(packages):
    return ", ".join(sorted(map(node, packages)))


def picture():
    """Return the graph and the table."""
    needs = packages()
    order = sorted(needs, key=lambda package: (-len(needs[package]), package))
    lines = ["```mermaid", "graph TD", '    root["emrun: contracts"]']
    lines += [f"    {node(one)} --> {node(other)}" for one, other in sorted(direct(needs))]
    lines += [f'    config -. "finds by name" .-> {package}' for package in FOUND_BY_NAME]
    lines += ["```", "", "| package | imports |", "|---|---|"]
    for each in order:
        more = f" (may also import {listed(others)})" if (others := MAY_IMPORT[each] - needs[each]) else ""
        lines.append(f"| `{node(each)}` | {listed(needs[each]) or 'nothing'}{more} |")
    return "".join(f"{line}\n" for line in lines)


def page_with(text):
    """Return the page with this drawing instead of its own."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page_with(picture()), encoding="utf-8")
    else:
        print(picture(), end="")
