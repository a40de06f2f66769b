"""The demo's training text: what is read, what is held out, how conversations are laid out. No torch is needed."""

from __future__ import annotations

import ast
import datetime
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest

from model.chat_template import ChatTemplate
from model.tokenizer import Tokenizer
from tools.train_demo import archive, card, chats, corpus, everyday_lists, everyday_numbers, sources
from tools.train_demo.chats import purpose
from tools.train_demo.sources import Document, Source
from tools.train_demo.tool_calls import TOOLS, tool_conversations

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "model" / "demo"
T = Tokenizer.load(DEMO)
TEMPLATE = ChatTemplate.load(DEMO, T)

CODE = '''"""A module."""

class Box:
    """A box of things, large enough to hold."""

    def put(self, thing):
        """Put a thing into the box."""
        self.things.append(thing)
        return self


def total(values):
    """Return the sum of all values."""
    result = 0
    for value in values:
        result += value
    return result
'''


def test_held_out_files_are_those_of_the_study() -> None:
    """Its held-out texts were published by key; a change of the rule would train on them."""
    for key in ("_collections_abc.py", "asyncio/transports.py", "distutils/command/register.py", "profile.py", "shlex.py", "tempfile.py"):
        assert Document("cpython-3.11", f"cpython-3.11/{key}", "py", "", True).held_out
    assert not Document("cpython-3.11", "cpython-3.11/argparse.py", "py", "", True).held_out
    assert Document("python3.11-doc", "pydoc//html/_sources/library/lzma.rst.txt", "rst", "", True).held_out


def test_trees_are_read_without_tests_and_copies(tmp_path: Path) -> None:
    for name, text in (("a.py", CODE), ("tests/b.py", CODE + "1"), ("sub/c.py", CODE), ("short.py", "x = 1"), ("_vendor/d.py", CODE + "2")):
        (tmp_path / "pack" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "pack" / name).write_text(text)
    source = Source("pack", "MIT", "pack", "pack", False)
    assert [d.key for d in sources.read_tree(source, tmp_path / "pack")] == ["pack/a.py", "pack/sub/c.py"]
    texts = tmp_path / "texts.xz"
    archive.write([Document("cpython-3.11", "cpython-3.11/x.py", "py", CODE + "3", True)], texts)
    read = sources.read_all(texts, tmp_path, [source, Source("absent", "MIT", "absent", "absent", False)])
    assert [d.key for d in read] == ["cpython-3.11/x.py", "pack/a.py"], "a second copy of a text is left out"


def test_the_manifest_tells_texts_apart(tmp_path: Path) -> None:
    texts = tmp_path / "texts.xz"

    def described(text: str) -> dict:
        documents = [Document("cpython-3.11", "cpython-3.11/x.py", "py", text, True)]
        archive.write(documents, texts)
        return sources.manifest(list(sources.read_archive(texts)), texts)

    first, again, other = described(CODE), described(CODE), described(CODE + "#")
    assert first == again and first["archive_sha256"] != other["archive_sha256"]
    entry = first["sources"]["cpython-3.11"]
    assert entry["files"] == 1 and entry["characters"] == len(CODE) and entry["sha256"] != other["sources"]["cpython-3.11"]["sha256"]
    assert all(e["licence"] for e in first["sources"].values()) and first["sources"]["torch"]["files"] == 0


def test_questions_are_made_of_definitions() -> None:
    document = Document("pack", "pack/a.py", "py", CODE, True)
    made = list(chats.from_code(document))
    answers = [c.messages[-1]["content"] for c in made]
    assert (
        len(made) == 3
        and answers[0].startswith("class Box:")
        and answers[1].startswith("def put(self")
        and "    result += value" in answers[2]
    )
    assert all("{" not in c.messages[-2]["content"] for c in made)
    assert made == list(chats.from_code(document)), "the same file gives the same questions"
    manual = ".. module:: box\n\n.. function:: total(values)\n\n   Return the sum of :class:`Box` values, all of them together.\n\n"
    manual += "   More.\n\nElse\n"
    (entry,) = chats.from_manual(Document("python3.11-doc", "pydoc/x", "rst", manual, True))
    assert "box.total" in entry.messages[-2]["content"] or "total(values)" in entry.messages[-2]["content"]
    assert entry.messages[-1]["content"] == "Return the sum of `Box` values, all of them together.\n\nMore."


@pytest.mark.parametrize(
    ("about", "want"),
    [
        ("Return the sum.", ("return the sum", "returns the sum")),
        ("Check a thing", ("check a thing", "checks a thing")),
        ("Copy a file.", ("copy a file", "copies a file")),
        ("Display a file.", ("display a file", "displays a file")),
        ("The sum of all.", None),
        ("Returns the sum.", None),
        ("sum", None),
    ],
)
def test_purposes(about: str, want: tuple[str, str] | None) -> None:
    assert purpose(about) == want


def test_everyday_functions_do_what_they_are_asked_for(tmp_path: Path) -> None:
    n, m = everyday_numbers, everyday_lists
    assert [n.factorial(5), n.factorial_recursive(5), n.fibonacci(10), n.gcd(12, 18), n.lcm(4, 6), n.power(3, 5)] == [
        120,
        120,
        55,
        6,
        12,
        243,
    ]
    assert n.fibonacci_list(6) == [0, 1, 1, 2, 3, 5] and n.primes_up_to(12) == [2, 3, 5, 7, 11] == [i for i in range(13) if n.is_prime(i)]
    assert n.prime_factors(60) == [2, 2, 3, 5] and n.is_palindrome("A man, a plan") is False and n.is_palindrome("Never odd or even")
    assert n.caesar_cipher("Zebra!", 2) == "Bgdtc!" and n.are_anagrams("Listen", "Silent") and n.median([3, 1, 2, 4]) == 2.5
    assert n.fizz_buzz(5) == ["1", "2", "Fizz", "4", "Buzz"] and n.is_leap_year(2000) and not n.is_leap_year(1900)
    assert n.from_binary(n.to_binary(37)) == 37 and n.days_between(datetime.date(2024, 1, 1), datetime.date(2024, 3, 1)) == 60
    items = [5, 2, 9, 2, 7]
    for sort in (m.bubble_sort, m.insertion_sort, m.quicksort, m.merge_sort):
        assert sort(items) == [2, 2, 5, 7, 9] and items == [5, 2, 9, 2, 7]
    assert m.binary_search([1, 3, 5], 5) == 2 and m.binary_search([1, 3, 5], 4) == -1 and m.flatten([1, [2, [3]]]) == [1, 2, 3]
    assert m.matrix_multiply([[1, 2]], [[3], [4]]) == [[11]] and m.balanced_parentheses("(())") and not m.balanced_parentheses(")(")
    assert m.breadth_first_search({1: [2, 3], 2: [3], 3: []}, 1) == [1, 2, 3] and m.remove_duplicates(items) == [5, 2, 9, 7]
    m.save_json({"a": 1}, tmp_path / "x.json")
    assert m.load_json(tmp_path / "x.json") == {"a": 1} and m.count_lines(tmp_path / "x.json") == 3
    for module in (n, m):
        for node in ast.parse(Path(module.__file__).read_text()).body:
            if isinstance(node, ast.FunctionDef):
                assert purpose(chats.first_line(ast.get_docstring(node) or "")), f"{node.name}: no sentence that asks for it"


def test_conversations_are_laid_out_as_the_template_lays_them_out() -> None:
    made = [*tool_conversations(24), *list(chats.everyday(copies=1))[::9], *chats.small_talk(3)]
    made += list(chats.join_pairs(made[-12:], 0.3, 0))[-3:]
    for conversation in made:
        ids, prompt = corpus.render(T, conversation)
        shown, tools = conversation.messages, conversation.tools or None
        whole = TEMPLATE.encode(shown, tools=tools, add_generation_prompt=False, preserve_thinking=True)
        assert T.decode(ids, False) == T.decode(whole, False) and ids == whole
        question = max(i for i, m in enumerate(shown) if m["role"] == "user")
        thinking = bool(shown[question + 1].get("reasoning"))
        assert T.decode(ids[:prompt], False) == T.decode(TEMPLATE.encode(shown[: question + 1], tools=tools, thinking=thinking), False)
        assert all(not m.get("reasoning") for m in shown[:question]), "a server would not send back old reasoning"


def test_tools_are_called_as_declared() -> None:
    by_name = {tool.name: tool for tool in TOOLS}
    calls = [call for c in tool_conversations(200) for m in c.messages for call in m.get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} == set(by_name)
    for call in calls:
        tool, arguments = by_name[call["function"]["name"]], json.loads(call["function"]["arguments"])
        assert set(arguments) == set(tool.required) == set(tool.properties)
    assert any(len(m.get("tool_calls", ())) == 2 for c in tool_conversations(200) for m in c.messages)


def test_a_corpus_is_split_and_kept(tmp_path: Path) -> None:
    def key_where(wanted: str, core: bool) -> Document:
        made = (Document("pack", f"pack/{i}.py", "py", CODE, core) for i in range(10_000))
        return next(d for d in made if chats.use_of(d) == wanted)

    documents = [key_where("train", True), key_where("held_out", True), key_where("train", False), key_where("prompt_only", False)]
    made = corpus.build(documents, DEMO, processes=1)
    assert all(len(made[name].start) == 1 for name in ("core", "held_text", "more", "prompt_text"))
    assert T.decode(made["core"].ids.tolist()[:-1]) == CODE and made["core"].ids[-1] == T.special["[EOS]"]
    assert len(made["prompt_chat"].start) == 3 and len(made["held_chat"].start) == 3 + corpus.TOOL_CHATS // 50
    chat = made["chat"]
    assert bool((chat.prompt > 0).all()) and int(chat.prompt.max()) < corpus.LONGEST_CHAT
    corpus.save(made, {"tokens": 1}, tmp_path / "t.npz")
    again, manifest = corpus.load(tmp_path / "t.npz")
    assert manifest == {"tokens": 1}
    assert all(np.array_equal(getattr(again[n], f), getattr(s, f)) for n, s in made.items() for f in ("ids", "start", "prompt"))


def test_the_card_tells_what_was_done_and_the_parts_join(tmp_path: Path) -> None:
    table = {"top1": [0.9] * 7, "top4": [0.95] * 7}
    judged = {"chain": 3.7, "8": 4.0, "16": 4.4, "32": 4.9, "64": 5.1, "by_depth": {"on_spine": table, "off_spine": table}}
    source = {"version": "3", "licence": "MIT", "files": 7, "characters": 12345, "sha256": "ab" * 32}
    absent = {"licence": "MIT", "files": 0}
    report = {
        "minutes": 9.5,
        "seed": 3,
        "date": "2026-01-02",
        "device": "GPU",
        "torch": "2",
        "seconds": {"target": 200.0},
        "calls": [{"target": 200.0}, {"drafter": 99.5, "card": 0.1}],
        "drafter": {"steps": 9, "anchors": 81, "seconds": 3.0, "before": {"steps": 7, "anchors": 49, "seconds": 2.5}},
        "losses": {"this": {"text": 1.5, "chat": 1.25}},
        "acceptance": {"chat": judged},
        "data": {"archive_sha256": "cd" * 32, "tokens": {"core": 10}, "sources": {"box": source, "none": absent}},
        "samples": [{"prompt": "<|im_user|>user<|im_middle|>Add two numbers<|im_end|>", "answer": "def add(a, b):<|im_end|>"}],
    }
    folder = tmp_path / "demo"
    folder.mkdir()
    card.write(report, folder)
    text = (folder / "CARD.md").read_text()
    for part in (
        "text 1.5, chat 1.25",
        "| chat | 3.7 | 4.0 | 4.4 | 4.9 | 5.1 |",
        "off spine, top4",
        "ab" * 32,
        "cd" * 32,
        "**Add two numbers**",
        "--seed 3",
        "in 2 calls, each going on from the one before: target 200.0; drafter 99.5, card 0.1.",
        "| drafter, before that | 7 steps, 49 anchors in 2.5 s |",
    ):
        assert part in text, part
    assert "none" not in (folder / "LICENCES").read_text() and "box" in (folder / "LICENCES").read_text()
    (folder / "weights").write_bytes(bytes(range(256)) * 80_000)
    out = tmp_path / "parts"
    out.mkdir()
    assert card.pack(folder, out) == 2 and all(p.stat().st_size <= card.PART_BYTES for p in out.glob("demo.tar.*"))
    whole = b"".join(p.read_bytes() for p in sorted(out.glob("demo.tar.*")))
    with tarfile.open(fileobj=io.BytesIO(whole)) as file:
        file.extractall(tmp_path / "again", filter="data")
    assert (tmp_path / "again" / "demo" / "weights").read_bytes() == (folder / "weights").read_bytes()
