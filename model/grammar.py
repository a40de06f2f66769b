"""Structured output: schemas, regular expressions and grammars to token masks, by llguidance.

A grammar is compiled once and copied for every generation (0.8 µs). While a prompt leaves the model in its
reasoning the grammar waits for </think>; until then only what would end the answer without one is
forbidden. All parsing is llguidance's, a derivative-based lexer and an Earley parser without
backtracking: https://github.com/guidance-ai/llguidance.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any

import numpy as np

from model.messages import TemplateError, check_json
from model.tokenizer import Tokenizer
from model.tool_parser import Markers
from runtime.constraint import StructuredOutputs
from runtime.types import I32, U32, DraftTree, InvalidRequest

MAX_CHARS = 1 << 18  # of a schema or grammar; compiling grows with it, 2,000 properties (60 kB) take 0.2 s
MAX_REGEX_CHARS = 1 << 14
MAX_CHOICES = 1024
MAX_LEXER_STATES = 50_000  # 1 to 2 kB each, built as they are met
FIRST_MASK_S = 0.25  # (a{1000}){1000} takes 0.45 s on its first mask, a large schema 0.015 s at 163,840 tokens
STEP_S = 1.0  # all masks of one tree
# Between JSON tokens one space, or a line end and its indentation: a model that may write more sometimes does,
# the demo model 32 spaces a time where 32 were possible.
WHITE_SPACE: Any = {"whitespace_pattern": r" |\r?\n[ \t]{0,32}"}
FIELD = "structured_outputs"


class Phase(Enum):
    WAITING = auto()  # in the reasoning
    ACTIVE = auto()
    ENDED = auto()  # end of sequence has been drawn: nothing is constrained any more


class GrammarState:
    """One generation under a grammar: follows `runtime.constraint.ConstraintState`."""

    def __init__(self, grammar: TokenGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._phase = Phase.ACTIVE if grammar.waiting is None else Phase.WAITING
        self.error: str | None = None

    def masks(self, tree: DraftTree) -> tuple[I32, U32]:
        nodes: list[int] = []
        bits = np.zeros((len(tree), self._grammar.words), np.uint32)
        for node, phase in self._walk(tree):
            if phase is not Phase.ENDED:
                self._mask(phase, bits[len(nodes)])
                nodes.append(node)
        order = np.argsort(np.array(nodes, np.int32))
        return np.array(nodes, np.int32)[order], bits[: len(nodes)][order]

    def prune(self, tree: DraftTree) -> DraftTree:
        keep = np.array(sorted(node for node, _ in self._walk(tree)))
        if len(keep) == len(tree):
            return tree
        place = np.full(len(tree) + 1, -1, np.int16)  # the last entry is that of the root's parent, -1
        place[keep] = np.arange(len(keep))
        return DraftTree(tree.token[keep], place[tree.parent[keep]], tree.depth[keep])

    def _walk(self, tree: DraftTree) -> Iterator[tuple[int, Phase]]:
        """Every allowed node, depth first, with its phase; the matcher stands at the node, and is rolled back on the way up."""
        end = time.perf_counter() + STEP_S
        children: list[list[int]] = [[] for _ in range(len(tree))]
        for node, parent in enumerate(tree.parent.tolist()[1:], 1):
            children[parent].append(node)
        token = tree.token.tolist()

        def visit(node: int, phase: Phase) -> Iterator[tuple[int, Phase]]:
            if time.perf_counter() > end:
                raise TimeoutError(f"the masks of one tree took {STEP_S:g} s")
            yield node, phase
            for child in children[node]:
                consumed, following = self._follow(token[child], phase)
                if following is not None:
                    yield from visit(child, following)
                if consumed and not self._matcher.rollback(1):
                    raise RuntimeError("llguidance: a token could not be taken back")

        return visit(0, self._phase)

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            _, following = self._follow(token, self._phase)
            if following is None:
                self.error = self._matcher.get_error() or f"token {token} is not allowed here"
                return
            self._phase = following

    def _mask(self, phase: Phase, into: U32) -> None:
        waiting = self._grammar.waiting
        if phase is Phase.WAITING and waiting is not None:
            into[:] = waiting
            return
        self._matcher.unsafe_compute_mask_ptr(into.ctypes.data, into.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(f"llguidance: {self._matcher.get_error()}")

    def _follow(self, token: int, phase: Phase) -> tuple[bool, Phase | None]:
        """(whether the matcher went on with the token, the phase after it or None where it is forbidden)."""
        grammar, matcher = self._grammar, self._matcher
        if phase is Phase.ENDED:
            return False, phase
        if phase is Phase.WAITING:
            if token not in grammar.begins:
                return False, None if token in grammar.forbidden else phase
            if not grammar.begins[token]:
                return False, Phase.ACTIVE
        elif token in grammar.ends:
            return False, Phase.ENDED if matcher.is_accepting() else None
        consumed = matcher.try_consume_tokens([token]) == 1
        return consumed, Phase.ACTIVE if consumed else None


class TokenGrammar:
    """A compiled grammar: follows `runtime.constraint.Constraint`.

    begins: tokens that end the waiting, and whether the grammar itself begins with them (a tool
    section does, </think> does not). waiting: the mask until then, None if the grammar begins at once.
    optional: it begins with a tool section, if the model ever opens one; all other text is free.
    """

    def __init__(
        self, matcher: Any, vocab_size: int, ends: frozenset[int], markers: Markers, in_reasoning: bool, optional: bool = False
    ) -> None:
        self._matcher = matcher
        self.words = -(-vocab_size // 32)
        self.ends = ends
        self.begins: dict[int, bool] = {}
        self.forbidden: frozenset[int] = frozenset()
        self.waiting: U32 | None = None
        section, think_end = markers.section_begin, markers.think_end
        if not optional and (not in_reasoning or think_end is None):
            return
        if section is not None and matcher.deep_copy().validate_tokens([section]) == 1:
            self.begins[section] = True
        if think_end is not None and not optional:
            self.begins[think_end] = False
        self.forbidden = (
            markers.ids() - self.begins.keys() - {markers.think_begin, think_end}
            if optional
            else (ends | markers.ids()) - self.begins.keys()
        )
        allowed = np.ones(32 * self.words, np.uint8)
        allowed[list(self.forbidden)] = 0
        allowed[vocab_size:] = 0
        self.waiting = np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    def start(self) -> GrammarState:
        return GrammarState(self, self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles structured outputs for one tokenizer; may be called from any thread.

    The token trie is built at first use (0.7 s for 163,840 tokens); the last 64 grammars are kept.
    """

    KEPT = 64

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._markers = Markers.of(tokenizer.special)
        self._trie: Any = None
        self._lock = threading.Lock()  # guards the two fields around it
        self._kept: OrderedDict[bytes, Any] = OrderedDict()

    def prepare(self) -> None:
        """Builds the token trie, if there is none yet."""
        self._tokens()

    def compile(self, outputs: StructuredOutputs, in_reasoning: bool = False, optional: bool = False) -> TokenGrammar:
        """The grammar of an output. in_reasoning: it begins after </think>; optional: see TokenGrammar.

        Raises InvalidRequest, field structured_outputs.NAME, for what is malformed, contradictory, too
        large or not supported. Bounded by llguidance's own limits: lexer fuel, grammar size, states.
        """
        name, grammar = self._source(outputs)
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            matcher = self._kept.get(key)
        if matcher is None:
            try:
                matcher = self._build(name, grammar)
            except (InvalidRequest, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in Rust is no Exception
                raise InvalidRequest(f"{FIELD}.{name}", "it can not be compiled") from error
            with self._lock:
                self._kept[key] = matcher
                while len(self._kept) > self.KEPT:
                    self._kept.popitem(last=False)
        return TokenGrammar(matcher, self._vocab_size, self._tokenizer.eos_ids, self._markers, in_reasoning, optional)

    def _build(self, name: str, grammar: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise InvalidRequest(f"{FIELD}.{name}", _first_line(matcher.get_error()))
        trial, start = matcher.deep_copy(), time.perf_counter()
        mask = np.frombuffer(trial.compute_bitmask(), np.uint32)
        took_s = time.perf_counter() - start
        if trial.is_error():
            raise InvalidRequest(f"{FIELD}.{name}", _first_line(trial.get_error()))
        if took_s > FIRST_MASK_S:
            raise InvalidRequest(f"{FIELD}.{name}", f"too complex: its first mask takes {took_s:.2f} s, {FIRST_MASK_S:g} s are possible")
        if not mask.any() or (trial.is_stopped() and not trial.is_accepting()):
            raise InvalidRequest(f"{FIELD}.{name}", "no text can match it")
        return matcher

    def _tokens(self) -> Any:
        with self._lock:
            if self._trie is None:
                from llguidance.tiktoken import lltokenizer_from_encoding

                ends = sorted(self._tokenizer.eos_ids)
                self._trie = lltokenizer_from_encoding(self._tokenizer._bpe, n_vocab=self._vocab_size, eos_token=ends)
            return self._trie

    def _source(self, outputs: StructuredOutputs) -> tuple[str, str]:
        """(field, llguidance's form of the grammar)."""
        from llguidance import LLMatcher, grammar_from

        given = {name: value for name in outputs.__slots__ if (value := getattr(outputs, name)) is not None and value is not False}
        if len(given) != 1:
            raise InvalidRequest(FIELD, f"{', '.join(given) or 'nothing'} given; exactly one of json, regex, choice, grammar, json_object")
        ((name, value),) = given.items()
        if name == "json_object":
            return name, LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=WHITE_SPACE)
        if name == "json":
            return name, LLMatcher.grammar_from_json_schema(json.dumps(check_schema(value)), defaults=WHITE_SPACE)
        if name == "choice":
            quoted = (json.dumps(item, ensure_ascii=False) for item in _choices(value))
            return name, LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))
        most = MAX_REGEX_CHARS if name == "regex" else 4 * MAX_CHARS if name == "lark" else MAX_CHARS
        if not isinstance(value, str) or not value or len(value) > most:
            raise InvalidRequest(f"{FIELD}.{name}", f"a string of 1 to {most} characters is needed")
        try:
            return name, grammar_from(name, value)  # type: ignore[arg-type]
        except Exception as error:  # the reader of GBNF raises what it likes
            raise InvalidRequest(f"{FIELD}.{name}", _first_line(str(error))) from None


def check_schema(schema: Any) -> Any:
    """A JSON schema as a bounded copy. Raises InvalidRequest for what is none; its keywords are llguidance's to judge."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{FIELD}.json", "a string that is no JSON") from None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{FIELD}.json", f"{type(schema).__name__} where a JSON schema, an object, is needed")
    try:
        copy = check_json(schema, "schema")
    except TemplateError as error:
        raise InvalidRequest(f"{FIELD}.json", str(error)) from None
    size = len(json.dumps(copy))
    if size > MAX_CHARS:
        raise InvalidRequest(f"{FIELD}.json", f"{size} characters of JSON; at most {MAX_CHARS}")
    return copy


def _choices(value: Any) -> list[str]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not 0 < len(value) <= MAX_CHOICES:
        raise InvalidRequest(f"{FIELD}.choice", f"a list of 1 to {MAX_CHOICES} strings is needed")
    if not all(isinstance(item, str) and item for item in value) or sum(map(len, value)) > MAX_CHARS:
        raise InvalidRequest(f"{FIELD}.choice", f"non-empty strings of {MAX_CHARS} characters in all are needed")
    return list(value)


def _first_line(text: str) -> str:
    """llguidance's message without the dump that may follow it."""
    return " ".join(line.strip() for line in text.split("<non-verbose/>")[0].splitlines() if line.strip())[:300] or "it can not be compiled"
