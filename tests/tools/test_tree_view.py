"""The page of steps: recorded on the demo model, drawn, read back, safe against what a model writes."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from runtime import measure
from tools.tree_view import StepRecord, TreeRecord, draw_tree, layout, load_steps, main, page

TREE = TreeRecord("0", ["a", " b", "<c>", "&", "\n"], [-1, 0, 1, 0, 1], [1.0, 0.9, 0.5, 0.2, 0.1], [0, 1, 4])
STEP = StepRecord(5, 8, 1, 2.7, 3, 10.0, 11.0, [TREE])


class Outline(HTMLParser):
    """Counts elements and remembers whatever could fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        if tag in ("script", "link", "img", "iframe", "c") or any(name in ("src", "href") or name.startswith("on") for name, _ in attrs):
            self.active.append(tag)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    return found


def test_children_stand_right_of_their_parents_and_nobody_on_top() -> None:
    places = layout(TREE.parent)
    assert [level for level, _ in places] == [0, 1, 2, 1, 2]
    assert len(set(places)) == len(places)
    assert places[1][1] == places[2][1] == 0 and places[4][1] == 1 and places[3][1] == 2


def test_accepted_nodes_are_marked() -> None:
    root = ElementTree.fromstring(draw_tree(TREE))
    titles = [t.text or "" for t in root.iter("title")]
    assert ["not accepted" in t for t in titles] == [False, False, True, True, False]
    solid = [r for r in root.iter("rect") if r.get("fill") != "none"]
    assert len(solid) == 3, "mutation: a node off the path drawn as accepted"
    assert "3 accepted" not in (root.get("aria-label") or "") and "2 accepted" in (root.get("aria-label") or "")


def test_what_a_model_writes_is_text() -> None:
    found = outline(page([STEP, STEP], "<script>alert(1)</script>"))
    assert not found.active and found.counts["section"] == 2 and found.counts["svg"] == 2
    assert outline("<script src='x'></script><c>").active, "the check can fail"


def test_the_command_records_draws_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "BUDGET_S", 0.3)
    saved, out = tmp_path / "s.json", tmp_path / "s.html"
    argv = ["--prompt", "def add(a, b):", "--prompt", "The runtime", "--tokens", "16", "--save", str(saved), "--out", str(out)]
    assert main(argv) == 0
    steps = load_steps(saved)
    assert sum(step.realised for step in steps) >= 2 * 15, "all but the prompts' first tokens"
    trees = [tree for step in steps for tree in step.trees]
    assert all(len(t.text) == len(t.parent) == len(t.chance) for t in trees)
    assert all(0 <= c <= 1 for t in trees for c in t.chance)
    assert all(t.path[0] == 0 and all(t.parent[b] == a for a, b in zip(t.path, t.path[1:], strict=False)) for t in trees)
    assert outline(out.read_text()).counts["svg"] == len(trees) > 0
    assert main(["--load", str(saved), "--out", str(tmp_path / "again.html")]) == 0
    assert outline((tmp_path / "again.html").read_text()).counts["section"] == len(steps)
    saved.write_text("[{}]")
    assert main(["--load", str(saved), "--out", str(out)]) == 2
    assert "not a record of steps" in capsys.readouterr().err
