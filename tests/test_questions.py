"""The questions that newcomers type into the search of the site: `make docs-questions` asks the search itself."""

import re
import tomllib

import pytest
from site_pages import DOCS, pages
from test_site import SETTINGS

QUESTIONS = tomllib.loads((DOCS / "_site" / "questions.toml").read_text(encoding="utf-8"))["question"]
WITHOUT_MEANING = {"after", "from", "is", "not", "on", "to", "with"}


def text_of(page):
    return pages().get(page) or (DOCS / page).read_text(encoding="utf-8")


def test_there_are_thirty_questions_and_each_is_from_a_public_thread():
    assert len({question["typed"] for question in QUESTIONS}) == len(QUESTIONS) == 30
    thread = r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+$"
    assert all(re.match(thread, question["asked"]) for question in QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=[question["typed"] for question in QUESTIONS])
def test_the_pages_that_answer_a_question_exist_and_one_of_them_has_its_words(question):
    words = set(re.split(r"[\s-]+", question["typed"])) - WITHOUT_MEANING
    texts = [text_of(page).lower() for page in question["answered_by"]]
    missing = [{word for word in words if not re.search(rf"\b{word}|_{word}", text)} for text in texts]
    assert min(map(len, missing)) == 0, missing


def test_the_search_takes_the_name_of_a_class_apart_and_keeps_a_key_whole():
    (search,) = [plugin["search"] for plugin in SETTINGS["plugins"] if "search" in plugin]
    words = re.split(search["separator"], "SaveBest: {model_name: best}, main_loop.workers, log/run")
    assert list(filter(None, words)) == ["Save", "Best", "model_name", "best", "main_loop", "workers", "log", "run"]
