"""AutoSpec's own training prompts."""

from __future__ import annotations

from collections import Counter

from autospec.bench.demo import PROMPTS
from autospec.prompts import read_prompts
from autospec.training.questions import make_questions


def test_questions_differ_and_none_is_the_demos() -> None:
    questions = make_questions(3000, 0)
    texts = {question.text for question in questions}
    assert len(texts) == len({question.id for question in questions}) == 3000
    assert not texts & {prompt.text for prompt in read_prompts(PROMPTS)}
    assert not [text for text in texts if "{" in text]
    counts = Counter(question.workload for question in questions)
    assert set(counts) == {"chat", "story", "math", "qa"}
    assert min(counts.values()) > 100


def test_a_seed_stands_for_its_questions() -> None:
    assert make_questions(50, 3) == make_questions(200, 3)[:50]
    assert make_questions(50, 3) != make_questions(50, 4)
