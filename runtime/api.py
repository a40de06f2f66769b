"""`runtime.load` and `runtime.LLM`: the one place where model, backend and engine are joined."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from model.chat_template import ChatTemplate
from model.grammar import GrammarCompiler
from model.reasoning import starts_in_reasoning
from model.tokenizer import Tokenizer
from runtime import loading, stages
from runtime.chosen import Chosen, choose
from runtime.config import AUTO, SpeculativeConfig
from runtime.constraint import check_sampling
from runtime.engine import Engine, QueueFull
from runtime.env import load_env
from runtime.executor import Executor
from runtime.measure import budget_speculation, curve_folder
from runtime.pace import Pace
from runtime.speculate import Speculator, make_speculator
from runtime.stream import TextStream
from runtime.types import Emission, InvalidRequest, Request, SamplingParams, TokenLogprob

SEED_STEP = 0x9E3779B97F4A7C15  # odd, so that the n choices of a request never share a key
U64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to serve: what a server or a script needs of it."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate
    name: str
    max_model_len: int
    vocab_size: int
    draft_depth: int  # 0: no drafter
    summary: str  # one line: what was chosen and why
    defaults: SamplingParams  # the checkpoint's generation_config
    rng: np.random.Generator
    grammars: GrammarCompiler

    def make_requests(
        self, id: str, prompt: Sequence[int], sampling: SamplingParams, arrived_s: float = 0.0, cache_salt: bytes = b""
    ) -> list[Request]:
        """The n requests of one prompt, ids `id`-0 … if n > 1. Choice i's key is seed + i * SEED_STEP, so the set can be repeated.

        Raises InvalidRequest naming the field.
        """
        sampling.check_tokens(self.vocab_size)
        seed = int(self.rng.integers(0, U64, dtype=np.uint64, endpoint=True)) if sampling.seed is None else sampling.seed & U64
        tokens = np.asarray(prompt, np.int32)
        one, constraint = sampling.replace(n=1), None
        if sampling.structured_outputs is not None:
            check_sampling(sampling)
            thinking = starts_in_reasoning(tokens.tolist()[-1:], self.tokenizer.special.get("<think>", -1))
            constraint = self.grammars.compile(sampling.structured_outputs, thinking)
        made = [
            Request(id if sampling.n == 1 else f"{id}-{i}", tokens, one, (seed + i * SEED_STEP) & U64, arrived_s, cache_salt, constraint)
            for i in range(sampling.n)
        ]
        self.engine.check(made[0])
        return made


def load(
    model: str | Path = "demo",
    *,
    served_model_name: str | None = None,
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None,
    load_format: str = "auto",
    hf_overrides: Mapping[str, Any] | str | None = None,
    backend: str = "auto",
    dtype: str = "auto",
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    distributed_executor: str = "local",
    nnodes: int | None = None,
    master_addr: str | None = None,
    max_model_len: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool = True,
    block_size: int | None = None,
    num_pages: int | None = None,
    max_num_queued_reqs: int | None = None,
    max_num_queued_tokens: int | None = None,
    step_deadline_s: float | None = None,
    gpu_memory_utilization: float | None = None,
    cudagraph_capture_sizes: Sequence[int] | None = None,
    enforce_eager: bool = False,
    batch_invariant: bool = False,
    scheduling_policy: str = "fcfs",
    tpot_target_ms: float | None = None,
    seed: int | None = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Loaded:
    """Opens, validates and loads a checkpoint; returns a stopped engine over it (`engine.start()` or `engine.step()`).

    load_format "dummy" needs config.json and the tokenizer's files alone: weights are random; hf_overrides replaces keys of its text
    model (num_hidden_layers). backend "auto" takes a GPU where there is one. cudagraph_capture_sizes: the M of its steps (None: 1
    to 1,024); batch_invariant: a row's bits do not depend on what shares its step (the CPU's never do). scheduling_policy "priority":
    lower priorities first. tpot_target_ms: admission and prompt chunks hold the mean time of an output token to it (runtime/pace.py).
    pipeline_parallel_size: stages of layers, each of tensor_parallel_size ranks on one host (runtime/stages.py).
    distributed_executor: who starts the ranks beside the first, "local" or "ray" (runtime/ray_ranks.py); with master_addr each of
    nnodes hosts starts its own stage (runtime/chosen.py).
    Raises ValueError, FileNotFoundError or CheckpointError naming file, key and values.
    """
    chosen = choose(
        model,
        speculative_config=speculative_config,
        load_format=load_format,
        hf_overrides=hf_overrides,
        backend=backend,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        distributed_executor=distributed_executor,
        nnodes=nnodes,
        master_addr=master_addr,
        cudagraph_capture_sizes=cudagraph_capture_sizes,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_pages=num_pages,
        enable_prefix_caching=enable_prefix_caching,
        block_size=block_size,
        max_num_queued_reqs=max_num_queued_reqs,
        max_num_queued_tokens=max_num_queued_tokens,
        step_deadline_s=step_deadline_s,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        batch_invariant=batch_invariant,
        scheduling_policy=scheduling_policy,
        tpot_target_ms=tpot_target_ms,
    )
    tokenizer = Tokenizer.load(chosen.source.path)
    return _join(chosen, tokenizer, _start(chosen, progress), served_model_name, seed, progress)


def _start(chosen: Chosen, progress: Callable[[str], None]) -> Executor:
    what = (chosen.source, chosen.config, chosen.speculative, chosen.activations, chosen.tp, progress, chosen.choice.backend)
    return stages.make_executor(*what, chosen.distributed, chosen.pp, chosen.master)


def _join(
    chosen: Chosen, tokenizer: Tokenizer, executor: Executor, name: str | None, seed: int | None, progress: Callable[[str], None]
) -> Loaded:
    """An engine over an executor, with all that a server needs beside it."""
    source, config = chosen.source, chosen.config

    def make_stream(params: SamplingParams) -> TextStream:
        return TextStream(tokenizer.stream(params.skip_special_tokens), params, tokenizer.eos_ids)

    speculator, pace = _make_speculator(chosen, executor, progress)
    engine = Engine(executor, config, make_stream, speculator, eos_ids=tokenizer.eos_ids, pace=pace)
    return Loaded(
        engine=engine,
        tokenizer=tokenizer,
        template=ChatTemplate.load(source.path, tokenizer),
        name=name or ("demo" if source.path == loading.DEMO else source.path.name),
        max_model_len=engine.max_model_len,
        vocab_size=source.target.vocab,
        draft_depth=executor.limits.draft_depth,
        summary=_summary(chosen, executor.limits.num_pages),
        defaults=loading.generation_defaults(source.path),
        rng=loading.rng_seed(seed),
        grammars=GrammarCompiler(tokenizer, source.target.vocab),
    )


def _make_speculator(chosen: Chosen, executor: Executor, progress: Callable[[str], None]) -> tuple[Speculator, Pace | None]:
    """The speculator asked for, and what holds a latency target.

    The model, its activations and the device ("": the CPU) tell stored cost curves apart.
    """
    config, speculative, source = chosen.config, chosen.speculative, chosen.source
    if speculative.tree_budget != AUTO and config.tpot_target_ms is None:
        return make_speculator(executor, speculative), None
    progress("cost curve")
    name = f"{source.path.name}-{source.target.layers}x{source.target.experts}-{chosen.activations}{f'-pp{chosen.pp}' * (chosen.pp > 1)}"
    folder = curve_folder(load_env().cache_dir)
    return budget_speculation(executor, config, speculative, name, chosen.tp, folder, chosen.choice.device)


def _summary(chosen: Chosen, pages: int) -> str:
    config, speculative, choice = chosen.config, chosen.speculative, chosen.choice
    c, drafter, cut = chosen.source.target, chosen.source.drafter, f", {chosen.pp} stages" if chosen.pp > 1 else ""
    how = "no speculation"
    if drafter and speculative.method == "dflash":
        how = f"DFlash chain of {speculative.num_speculative_tokens or drafter.depth}"
    elif drafter:
        how = f"DDTree of {speculative.tree_budget} nodes, depth {speculative.num_speculative_tokens or drafter.depth}"
    graphs = "" if choice.backend == "numpy" else ", eager" if config.enforce_eager else f", graphs of {len(config.buckets)} sizes"
    return (
        f"{chosen.source.path.name}: {c.layers} layers, {c.experts} experts top-{c.top_k} · "
        f"{choice.backend} {chosen.activations}, TP {chosen.tp}{cut}{graphs} ({choice.reason}) · {how} · "
        f"{(pages - 1) * config.block_size:,} cache tokens in pages of {config.block_size} · context {config.max_model_len:,}"
    )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One finished choice; field names are vLLM's."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt; field names are vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    finished: bool = True


@dataclass(slots=True)
class _Collected:
    """What the emissions of one request add up to."""

    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    last: Emission | None = None
    cached: int = 0

    def add(self, emission: Emission) -> None:
        self.tokens.extend(emission.tokens)
        self.text.append(emission.text)
        self.logprobs.extend(emission.logprobs or ())
        self.cached = max(self.cached, emission.cached_tokens)
        self.last = emission


class LLM:
    """Offline generation, as vLLM's class of that name: `LLM("demo").generate(prompts, SamplingParams(...))`.

    Takes `load`'s arguments. Text is the same with and without speculation, alone and in a batch.
    """

    def __init__(self, model: str | Path = "demo", **options: Any) -> None:
        self.loaded = load(model, **options)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        return self.loaded.defaults

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts: strings, token lists, or {"prompt": …} / {"prompt_token_ids": …} as vLLM takes them.

        Raises InvalidRequest naming the field before anything runs.
        """
        texts = [self._prompt(p) for p in _as_list(prompts)]
        params = self._params(sampling_params, len(texts))
        return self._run([(text, tokens, p) for (text, tokens), p in zip(texts, params, strict=True)])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, rendered by the checkpoint's own template."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params(sampling_params, len(conversations))
        encode = self.loaded.template.encode
        jobs = [
            (None, encode(conversation, tools=tools, add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})), p)
            for conversation, p in zip(conversations, params, strict=True)
        ]
        return self._run(jobs)

    def _prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            return prompt, self.loaded.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and all(isinstance(t, (int, np.integer)) for t in prompt):
            return None, [int(t) for t in prompt]
        raise InvalidRequest("prompts", f"{type(prompt).__name__} is neither text nor a list of token ids")

    def _params(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.loaded.defaults] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise InvalidRequest("sampling_params", f"{len(given)} for {count} prompts")
        return list(given)

    def _run(self, jobs: Sequence[tuple[str | None, list[int], SamplingParams]]) -> list[RequestOutput]:
        made = [self.loaded.make_requests(str(next(self._ids)), tokens, params) for _, tokens, params in jobs]
        collected = {request.id: _Collected() for group in made for request in group}
        for request in itertools.chain.from_iterable(made):
            self._submit(request, collected[request.id])
        while any(c.last is None or c.last.finish is None for c in collected.values()):
            self.loaded.engine.step()
        return [
            RequestOutput(
                request_id=group[0].id.partition("-")[0],
                prompt=text,
                prompt_token_ids=tuple(tokens),
                outputs=tuple(_completion(i, request, collected[request.id], self.loaded.engine.dead) for i, request in enumerate(group)),
                num_cached_tokens=max(collected[r.id].cached for r in group),
            )
            for (text, tokens, _), group in zip(jobs, made, strict=True)
        ]

    def _submit(self, request: Request, collected: _Collected) -> None:
        """Queues a request; a full queue is worked off first, so any number of prompts may be given at once."""
        while True:
            try:
                return self.loaded.engine.submit(request, collected.add)
            except QueueFull:
                self.loaded.engine.step()


def _completion(index: int, request: Request, got: _Collected, dead: BaseException | None) -> CompletionOutput:
    """Raises RuntimeError for a request that failed, with what the engine died of."""
    last = got.last
    if last is None or last.finish == "error":
        why = f": {type(dead).__name__}: {dead}" if dead else ""
        raise RuntimeError(f"request {request.id} failed: {last.error if last else 'no emission'}{why}") from dead
    wanted = request.sampling.logprobs is not None
    return CompletionOutput(
        index=index,
        text="".join(got.text),
        token_ids=tuple(got.tokens),
        cumulative_logprob=sum(t.logprob for t in got.logprobs) if wanted else None,
        logprobs=tuple(got.logprobs) if wanted else None,
        finish_reason=last.finish,
        stop_reason=last.stop_reason,
    )


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, Mapping)) or (prompts and isinstance(prompts[0], (int, np.integer))):
        return [prompts]
    return list(prompts)
