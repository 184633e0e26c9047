"""Draws a Mermaid graph of packages as SVG, since the site asks no other server for Mermaid."""

import re
from collections import defaultdict
from html import escape
from itertools import pairwise

_LABEL = re.compile(r'^ +(\w+)\["(.+)"\]$', re.MULTILINE)
_ARROW = re.compile(r"^ +(\w+) --> (\w+)$", re.MULTILINE)
_DASHED = re.compile(r'^ +(\w+) -\. "(.+)" \.-> (\w+)$', re.MULTILINE)
_ACROSS, _DOWN = 130, 68  # pixels between the middles of two nodes
_HALF_WIDTH, _HALF_HEIGHT = 58, 15  # of a node
_SWEEPS = 8


def svg(mermaid):
    """Return the drawing of a graph; whoever imports stands above what it imports.

    Args:
        mermaid: lines of the kinds `a["label"]`, `a --> b` and `a -. "label" .-> b`; the arrows `-->` make no circle.
    """
    labels = dict(_LABEL.findall(mermaid))
    arrows = [(one, other, "imports") for one, other in _ARROW.findall(mermaid)]
    dashed = [(one, other, "dashed") for one, _, other in _DASHED.findall(mermaid)]
    rows = _rows(arrows)
    paths = [(_path(one, other, rows), kind) for one, other, kind in arrows + dashed]
    places = _places(rows, [path for path, _ in paths])
    width = _ACROSS * max(1 + max(x for x, _ in places.values()), 1)
    height = _DOWN * (1 + max(rows.values()))
    points = {each: (_ACROSS * (x + 0.5), height - _DOWN * (y + 0.5)) for each, (x, y) in places.items()}
    lines = [_line([points[each] for each in path], kind) for path, kind in paths]
    nodes = [_node(labels.get(name, name), *points[name]) for name in rows]
    keys = dict.fromkeys(f"Dashed: {label}" for _, label, _ in _DASHED.findall(mermaid))
    return "\n".join(
        [
            '<figure class="graph">',
            f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="The packages and what they import">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            '<path d="M0 0L8 4L0 8z"/></marker></defs>',
            *lines,
            *nodes,
            "</svg>",
            f"<figcaption>{escape(', '.join(keys))}</figcaption>",
            "</figure>",
        ]
    )


def _rows(arrows):
    """Return node -> how many arrows lead from it to the lowest one, on the longest way."""
    below = defaultdict(list)
    for one, other, _ in arrows:
        below[one].append(other)
        below[other] += []

    def row(node):
        return 1 + max(map(row, below[node]), default=-1)

    return {node: row(node) for node in below}


def _path(one, other, rows):
    """Return the two ends of an arrow, and between them a point for each row that it crosses."""
    begin, end = rows[one], rows[other]
    step = 1 if end > begin else -1
    return [one, *((one, other, row) for row in range(begin + step, end, step)), other]


def _places(rows, paths):
    """Return each node and point -> column and row: neighbours lie near each other, and each row is in the middle."""
    neighbours = defaultdict(list)
    for path in paths:
        for one, other in pairwise(path):
            neighbours[one].append(other)
            neighbours[other].append(one)
    lines = defaultdict(list)
    for each in neighbours:
        lines[rows[each] if each in rows else each[2]].append(each)
    columns = {each: index for line in lines.values() for index, each in enumerate(line)}
    widest = max(map(len, lines.values()))
    for sweep in range(_SWEEPS):
        for row in sorted(lines, reverse=sweep % 2 == 0):
            line = lines[row]
            line.sort(key=lambda each: sum(columns[near] for near in neighbours[each]) / len(neighbours[each]))
            columns |= {each: index + (widest - len(line)) / 2 for index, each in enumerate(line)}
    return {each: (columns[each], row) for row, line in lines.items() for each in line}


def _line(points, kind):
    """Return an arrow through points, from the edge of the first node to that of the last one."""
    (x, y), (x_after, y_after) = points[0], points[1]
    points[0] = _edge(x, y, x_after, y_after)
    (x, y), (x_before, y_before) = points[-1], points[-2]
    points[-1] = _edge(x, y, x_before, y_before)
    return f'<polyline class="{kind}" marker-end="url(#tip)" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>'


def _edge(x, y, towards_x, towards_y):
    """Return where the line from the middle of a node towards a point leaves the node."""
    across, down = towards_x - x, towards_y - y
    part = min(_HALF_WIDTH / max(abs(across), 1), _HALF_HEIGHT / max(abs(down), 1))
    return round(x + part * across, 1), round(y + part * down, 1)


def _node(label, x, y):
    left, top = x - _HALF_WIDTH, y - _HALF_HEIGHT
    box = f'<rect x="{left:g}" y="{top:g}" width="{2 * _HALF_WIDTH}" height="{2 * _HALF_HEIGHT}" rx="4"/>'
    return f'{box}<text x="{x:g}" y="{y + 4:g}">{escape(label)}</text>'
