"""The drawing of the packages in the site is made of the Mermaid graph in docs/about/architecture.md."""

import re
from pathlib import Path
from xml.etree import ElementTree

from site_graph import svg

PAGE = (Path(__file__).parent.parent / "docs" / "about" / "architecture.md").read_text(encoding="utf-8")
GRAPH = re.search(r"^```mermaid\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]


def middles(figure):
    """Return the text of each node -> the middle of the node."""
    return {each.text: (float(each.get("x")), float(each.get("y"))) for each in figure.iter("text")}


def test_the_drawing_has_each_package_and_each_arrow():
    figure = ElementTree.fromstring(svg(GRAPH))
    names = set(re.findall(r"\b\w+\b(?= -->| -\.)|(?<=> )\w+$", GRAPH, re.MULTILINE))
    assert middles(figure).keys() == names - {"root"} | {"emrun: contracts"}
    kinds = [each.get("class") for each in figure.iter("polyline")]
    assert (kinds.count("imports"), kinds.count("dashed")) == (GRAPH.count("-->"), GRAPH.count(".->"))
    assert figure.find("figcaption").text == "Dashed: finds by name"


def test_a_package_stands_above_what_it_imports_and_no_two_lie_on_each_other():
    places = middles(ElementTree.fromstring(svg(GRAPH)))
    places["root"] = places.pop("emrun: contracts")
    arrows = re.findall(r"^ +(\w+) --> (\w+)$", GRAPH, re.MULTILINE)
    assert len(arrows) > 15
    for one, other in arrows:
        assert places[one][1] < places[other][1]
    assert len(set(places.values())) == len(places)


def test_an_arrow_over_several_rows_goes_around_the_nodes_between():
    figure = ElementTree.fromstring(svg("    a --> b\n    b --> c\n    a --> c\n"))
    longest = max(figure.iter("polyline"), key=lambda line: len(line.get("points")))
    middle = longest.get("points").split()[1]
    assert len(longest.get("points").split()) == 3
    assert abs(float(middle.split(",")[0]) - middles(figure)["b"][0]) > 58
