"""Prompt files: both forms of a line, what is wrong with one, and which prompts a limit leaves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from prompts import DEFAULT_FILE, Prompt, PromptOptions, read_prompts, spread


def test_a_line_holds_turns_or_one_prompt(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"id": 81, "category": "writing", "turns": ["Écris.", "Again."], "reference": []}\n\n{"prompt": "Hi"}\n',
        encoding="utf-8",
    )
    assert read_prompts(path) == [Prompt("81", "writing", ("Écris.", "Again.")), Prompt("3", "all", ("Hi",))]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 1}', "prompts.jsonl:2: Expected `str | null`, got `int`"),
        ('{"prompt": "a"}\nhello', "prompts.jsonl:2: JSON is malformed"),
        ('{"id": 1}', "prompts.jsonl:1: needs `turns` or `prompt`"),
        ('{"turns": []}', "prompts.jsonl:1: needs `turns` or `prompt`"),
        ("\n", "prompts.jsonl: holds no prompts"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_prompts(path)
    assert complaint in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.jsonl: cannot be read \(No such file or directory\)"):
        read_prompts(tmp_path / "nothing.jsonl")


def test_a_limit_spreads_over_the_whole_file() -> None:
    assert spread("aaabbbccc", 3) == ["a", "b", "c"]
    assert spread(range(10), 4) == [0, 2, 5, 7]
    assert spread(range(3), 10) == [0, 1, 2]
    assert spread(range(3), None) == [0, 1, 2]


def test_the_projects_own_prompts_are_many_and_of_many_kinds() -> None:
    prompts = PromptOptions().read()
    assert len(prompts) >= 40
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    categories = Counter(prompt.category for prompt in prompts)
    assert len(categories) >= 8
    assert min(categories.values()) >= 3
    assert any(len(prompt.turns) > 1 for prompt in prompts)
    head = [prompt.category for prompt in prompts[: len(categories)]]
    assert len(set(head)) == len(categories), f"{DEFAULT_FILE.name} does not start with one of each category"
