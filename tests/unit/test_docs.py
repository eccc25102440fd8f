"""What the documents show works."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = re.findall(r"[a-z_]+\.py", (ROOT / "CONTRIBUTING.md").read_text())
EXTEND = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL))


def test_the_reward_functions_of_the_documents_score() -> None:
    shown: dict = {}
    exec(EXTEND, shown)
    assert shown["score"](["?"] * 2, ["it is 42", "it is 41"], answer=["42", "42"]) == [1.0, 0.0]
    completions = ["42", "41 No. Again: 42", "41 No. Again: 40", "42 No. Again: 41"]
    assert shown["last_answer"](["?"] * 4, completions, answer=["42"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", sorted(set(MAP)))
def test_what_is_on_the_map_of_the_code_exists(name: str) -> None:
    assert any(next((ROOT / top).rglob(name), None) for top in ("mesh", "transport", "roles", "tests"))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_documents_link_to_documents_that_exist(page: str) -> None:
    for target in re.findall(r"\]\(([^):#]+\.md)\)", (ROOT / page).read_text()):
        assert (ROOT / page).parent.joinpath(target).is_file(), target
