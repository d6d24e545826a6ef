"""Drawings and figures of the recipes' pages are those that the repository's scripts make."""

import re
from pathlib import Path

import pytest
from benchmarks import drawings, gallery

import gradwire
from gradwire.recipes import for_others

# Recipes on the page of another.
SHARED = {"fp16": "bf16", "int3": "int2"}
DOCS = Path(__file__).parent.parent / "docs"


def content(files):
    return {path.relative_to(DOCS): text for path, text in files}


@pytest.mark.parametrize(
    ("made", "how"),
    [(drawings.drawings, "python benchmarks/drawings.py"), (gallery.files, "python benchmarks/gallery.py")],
)
def test_files_are_up_to_date(made, how):
    wanted = content(made())
    assert len(wanted) > 8
    assert not [path for path, text in wanted.items() if (DOCS / path).read_text() != text], f"run {how}"


def test_every_recipe_has_a_page_that_says_when_it_goes_wrong():
    index = (DOCS / "recipes" / "index.md").read_text()
    assert "(../auto.md)" in index
    for recipe in set(gradwire.RECIPES) - {"noop", "fp32", "auto"}:
        page = DOCS / "recipes" / f"{SHARED.get(recipe, recipe)}.md"
        assert f"({page.name})" in index, recipe
        text = page.read_text()
        for heading in ("What travels", "Figures", "When to use it", "When it goes wrong"):
            assert f"\n## {heading}\n" in text, (recipe, heading)
        assert re.search(rf"^\| `{recipe}` \|", text, re.MULTILINE), recipe
        assert re.search(r"!\[[^]]+\]\([\w./-]+\.svg\)", text), recipe


@pytest.mark.parametrize("recipe", drawings.MESSAGES)
def test_drawn_bytes_are_those_that_are_sent(recipe):
    numel = 1 << 20
    drawn = sum(part[1] for part in drawings.MESSAGES[recipe][1])
    sent = for_others(gradwire.recipe(recipe)).wire_bytes(numel, world_size=2)
    assert sent * 256 / numel == pytest.approx(drawn, rel=1e-3)
