"""What a request says about the form of its answer, compiled: response_format, structured_outputs, tool_choice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from model.structural_tag import tags_grammar
from model.thinking import ThinkingBudget
from model.tool_grammar import arguments_schema, calls_grammar, check_parameters
from model.tool_parser import Markers
from runtime.constraint import Constraint, StructuredOutputs, check_sampling
from runtime.types import InvalidRequest, SamplingParams
from server.errors import bad_field, echo, from_invalid
from server.protocol import ChatRequest, GenerationFields, ResponseFormat
from server.service import Service

if TYPE_CHECKING:
    from runtime.api import Loaded

_SCHEMA = "response_format.json_schema.schema"


async def constraint_of(
    service: Service, loaded: Loaded, request: GenerationFields, params: SamplingParams, in_reasoning: bool
) -> Constraint | None:
    """The compiled constraint of a request, None where its output is free. Raises ApiError: 400 naming the field, 503 when too many wait.

    Compiling runs off the event loop and is cut off after limits.compile_s; the engine's stages never compile.
    """
    outputs, rename = _wanted(request)
    optional = False
    if isinstance(request, ChatRequest) and calls_tools(request):
        outputs, optional = _with_tools(request, outputs, Markers.of(loaded.tokenizer.special))
    if outputs is None:
        return None
    grammars, wanted = loaded.grammars, outputs

    def compile_it() -> Constraint:
        return grammars.compile(wanted, in_reasoning, optional)

    try:
        if not optional:
            check_sampling(params)
        await _bounded(service, grammars.prepare, None)
        return await _bounded(service, compile_it, service.limits.compile_s)
    except TimeoutError:
        raise bad_field(_field_of(request), f"compiling it takes longer than {service.limits.compile_s:g} s; make it simpler") from None
    except InvalidRequest as error:
        if wanted.lark is not None:
            await _name_the_tool(service, loaded, request)
        raise from_invalid(error, {**rename, "structured_outputs.lark": _field_of(request)}) from None


def with_thinking_bound(loaded: Loaded, request: ChatRequest, in_reasoning: bool, constraint: Constraint | None) -> Constraint | None:
    """The constraint with thinking_token_budget around it, where the request has one. Raises ApiError 400."""
    if request.thinking_token_budget is None:
        return constraint
    try:
        tokens = min(request.thinking_token_budget, 2**31 - 1)
        markers = Markers.of(loaded.tokenizer.special)
        return ThinkingBudget(tokens, markers, loaded.vocab_size, in_reasoning, constraint, calls_tools(request))
    except InvalidRequest as error:
        raise from_invalid(error) from None


async def _bounded(service: Service, work: Callable[[], Any], timeout_s: float | None) -> Any:
    """Runs work in a thread. One that is cut off still ends by llguidance's own limits; until then it counts as waiting."""
    if service.compiling >= service.limits.max_compiling:
        raise service.refused("queue_full", "too many schemas are being compiled; try again shortly")
    service.compiling += 1
    future = asyncio.get_running_loop().run_in_executor(service.compilers, work)

    def done(ended: asyncio.Future[Any]) -> None:
        service.compiling -= 1
        if not ended.cancelled():
            ended.exception()  # heard, also where nobody waits any more

    future.add_done_callback(done)
    async with asyncio.timeout(timeout_s):
        return await asyncio.shield(future)


def calls_tools(request: ChatRequest) -> bool:
    """Whether the answer may hold calls."""
    return bool(request.tools) and request.tool_choice != "none"


def check_tools(request: ChatRequest) -> None:
    """Raises ApiError 400 for tools or a tool_choice that are malformed, or that do not fit each other."""
    names = []
    for at, tool in enumerate(request.tools or ()):
        if tool.get("type") != "function":
            raise bad_field(f"tools[{at}].type", f'{echo(tool.get("type"))} is not "function"')
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise bad_field(f"tools[{at}].function.name", "a non-empty string is needed")
        names.append(name)
        if request.tool_choice != "none":
            try:
                check_parameters(function.get("parameters"), f"tools[{at}].function.parameters")
            except InvalidRequest as error:
                raise from_invalid(error) from None
    choice = request.tool_choice
    if choice in (None, "auto", "none"):
        return
    if not names:
        raise bad_field("tool_choice", f"{echo(choice)} without tools to choose from")
    if choice != "required" and _named(choice) is None:
        forms = '"auto", "none", "required", {"type": "function", "function": {"name": NAME}}'
        raise bad_field("tool_choice", f"{echo(choice)} is none of {forms}")
    if choice != "required" and _named(choice) not in names:
        raise bad_field("tool_choice", f"{echo(_named(choice))} is none of the tools")


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _wanted(request: GenerationFields) -> tuple[StructuredOutputs | None, Mapping[str, str]]:
    """The form of the text, and how the client calls its fields. Raises ApiError 400."""
    form, given = request.response_format, request.structured_outputs
    if form is not None and form.type != "text":
        if given is not None:
            raise bad_field("structured_outputs", "not together with response_format")
        if form.type == "json_object":
            return StructuredOutputs(json_object=True), {"structured_outputs.json_object": "response_format"}
        if form.type == "structural_tag":
            return _tags(form), {}
        if form.type != "json_schema":
            raise bad_field("response_format.type", f'{echo(form.type)} is none of "text", "json_object", "json_schema", "structural_tag"')
        schema = (form.json_schema or {}).get("schema")
        if not isinstance(schema, dict):
            raise bad_field(_SCHEMA, "an object, the JSON schema, is needed")
        return StructuredOutputs(json=schema), {"structured_outputs.json": _SCHEMA}
    if given is None:
        return None, {}
    return StructuredOutputs(given.json, given.regex, given.choice, given.grammar, given.json_object or None), {}


def _tags(form: ResponseFormat) -> StructuredOutputs:
    if form.format is not None:
        raise bad_field("response_format.format", "not supported; structures and triggers are")
    try:
        return tags_grammar(form.structures, form.triggers, "response_format")
    except InvalidRequest as error:
        raise from_invalid(error) from None


def _with_tools(request: ChatRequest, outputs: StructuredOutputs | None, markers: Markers) -> tuple[StructuredOutputs | None, bool]:
    """(the form of an answer that may or must call tools, whether only its calls are held to it).

    A forced call leaves no text that response_format could shape. Left to choose, the model is held to the
    declarations only where a tool is strict or parallel calls are switched off.
    """
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools or ()}
    several = request.parallel_tool_calls is not False
    schemas = {name: function.get("parameters") for name, function in functions.items()}
    try:
        if request.tool_choice == "required":
            return calls_grammar(schemas, markers, several), False
        name = _named(request.tool_choice)
        if name is not None:
            return calls_grammar({name: schemas[name]}, markers, False), False
        if outputs is not None:
            if outputs.json is None and outputs.json_object is None:
                raise bad_field(_field_of(request), 'with tools only a JSON schema, or tool_choice "none"')
            answer = {"type": "object"} if outputs.json is None else outputs.json
            if not isinstance(answer, Mapping):
                raise bad_field("structured_outputs.json", "with tools an object is needed, not its text")
            return calls_grammar(schemas, markers, several, answer), False
        strict = {name for name, function in functions.items() if function.get("strict") is True}
        if several and not strict:
            return None, False
        return calls_grammar({name: schemas[name] if name in strict else None for name in functions}, markers, several), True
    except InvalidRequest as error:
        raise from_invalid(error) from None


async def _name_the_tool(service: Service, loaded: Loaded, request: GenerationFields) -> None:
    """Compiles each declaration alone, so that the error can name the one that is at fault."""
    for at, tool in enumerate((request.tools or ()) if isinstance(request, ChatRequest) else ()):
        outputs, field = StructuredOutputs(json=arguments_schema(tool["function"].get("parameters"))), f"tools[{at}].function.parameters"
        try:
            await _bounded(service, lambda outputs=outputs: loaded.grammars.compile(outputs), service.limits.compile_s)  # type: ignore[misc]
        except InvalidRequest as error:
            raise from_invalid(error, {"structured_outputs.json": field}) from None


def _field_of(request: GenerationFields) -> str:
    """What the client sent that is being compiled."""
    if request.response_format is not None:
        return "response_format"
    return "structured_outputs" if request.structured_outputs is not None else "tools"
