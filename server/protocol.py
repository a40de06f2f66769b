"""The wire: request bodies as msgspec structs, and the pieces of the answers.

Field names are OpenAI's, then vLLM's. Types are strict ("n": 1.0 or "1" is refused); ranges are
checked where the value is used, so that each is written once. Absent and null mean the same.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # the first two: no thinking; the model knows no other degrees


class ResponseFormat(msgspec.Struct):
    """type text, json_object, json_schema (with json_schema) or structural_tag (with structures and triggers)."""

    type: str
    json_schema: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: Any = None  # structural_tag's newer form, which is refused


class StructuredFields(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's structured_outputs: exactly one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationFields(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    vllm_xargs: dict[str, float | int] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions. What a message may hold is the chat template's to check."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # "none" and "minimal" switch thinking off, any other on
    thinking_token_budget: int | None = None  # tokens of reasoning after which only its end may follow


# Fields that would change the output and are not served yet: name -> (values that mean "off", what to do).
# A field outside this table and outside the structs is accepted, ignored and logged once.
NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "ask for n choices and pick one yourself"),
    "suffix": (("",), "fill-in-the-middle is not supported"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1, 1.0), "beam search is not supported"),
    "prompt_logprobs": ((), "log-probabilities of the prompt are not supported"),
    "prompt_embeds": ((), "send text or token ids"),
    "allowed_token_ids": ((), "use logit_bias"),
    "bad_words": (([],), "use logit_bias"),
    "logits_processors": (([],), "use logit_bias"),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
    "continue_final_message": ((False,), "end the messages with a user or tool message"),
    "add_generation_prompt": ((True,), "the generation prompt is always added"),
    "chat_template": ((), "a template out of a request is never run"),
    "thinking": ((), 'use chat_template_kwargs {"thinking": true or false}, or reasoning_effort'),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "guided_json": ((), "use structured_outputs.json or response_format"),
    "guided_regex": ((), "use structured_outputs.regex"),
    "guided_choice": ((), "use structured_outputs.choice"),
    "guided_grammar": ((), "use structured_outputs.grammar"),
    "echo": ((False,), "the messages are not repeated in the answer"),
    "documents": (([],), "put them into a message"),
    "prediction": ((), "drafts come from the server's own drafter"),
    "web_search_options": ((), "there is no search"),
    "store": ((False,), "nothing is stored"),
    "verbosity": (("medium",), "ask for it in a message"),
    "logprob_token_ids": ((), "use top_logprobs"),
    "return_token_ids": ((False,), "use logprobs, or /tokenize"),
    "return_tokens_as_token_ids": ((False,), "use /tokenize"),
    "detokenize": ((True,), "answers are text"),
    "kv_transfer_params": ((), "there is one server"),
    "typical_p": ((1, 1.0), "use top_p or min_p"),
    "top_a": ((0, 0.0), "use top_p or min_p"),
    "xtc_probability": ((0, 0.0), "use top_p or min_p"),
    "dry_multiplier": ((0, 0.0), "use frequency_penalty"),
    "mirostat": ((0,), "use temperature"),
    "stop_regex": ((), "use stop"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
    "regex": ((), "use structured_outputs.regex"),
    "ebnf": ((), "use structured_outputs.grammar"),
    "json_schema": ((), "use structured_outputs.json or response_format"),
    "structural_tag": ((), "use response_format"),
    "include_reasoning": ((True,), "switch thinking off, or leave the field unread"),
    "separate_reasoning": ((True,), "reasoning is always a field of its own"),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes"),
    "spaces_between_special_tokens": ((True,), "text is decoded as the tokenizer has it"),
    "mm_processor_kwargs": (({},), "text is the only modality"),
    "custom_logit_processor": ((), "use logit_bias"),
    "custom_params": (({},), "there is no custom logit processor"),
    "lora_path": ((), "there are no adapters"),
    "session_params": (({},), "nothing is stored"),
    "return_hidden_states": ((False,), "only text and log-probabilities are returned"),
    "return_routed_experts": ((False,), "ask for the count: --per-request-spec-decode-metrics"),
    "return_prompt_token_ids": ((False,), "use /tokenize"),
    "repetition_detection": ((), "use frequency_penalty"),
    "reasoning_effort": ((), "only chat completions have reasoning"),
    "thinking_token_budget": ((), "only chat completions have reasoning"),
    "tools": (([],), "only chat completions call tools"),
    "tool_choice": (("none",), "only chat completions call tools"),
    "top_logprobs": ((0,), "logprobs is the number here; top_logprobs belongs to chat completions"),
    "audio": ((), "text is the only modality"),
    "modalities": ((["text"],), "text is the only modality"),
}


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails
