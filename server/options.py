"""Command-line options that say which model to load and how: shared by the server, the chat client and the bench."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import Loaded

METHODS = ("auto", "ddtree", "dflash", "none")
POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "dummy")


class WideHelp(argparse.RawDescriptionHelpFormatter):
    """Help with the texts as they are written and the flags' meanings beside them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=44, width=140)


class OptionError(ValueError):
    """Options that contradict each other; the text names them and says what to do."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The groups model, capacity and speculation. Names are vLLM's; SGLang's are aliases."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "model", nargs="?", default=None, help="checkpoint folder, or 'demo': the 22-million-parameter model that comes along"
    )
    group.add_argument("--model", "--model-path", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the folder's name)")
    group.add_argument(
        "--load-format", default="auto", choices=LOAD_FORMATS, help="auto: files; dummy: random weights, config.json is enough"
    )
    group.add_argument("--hf-overrides", metavar="JSON", help="keys of config.json's text model to replace: '{\"num_hidden_layers\": 8}'")
    group.add_argument("--backend", default="auto", help="what computes; 'auto' takes the best there is (default)")
    group.add_argument("--dtype", default="auto", help="activations: auto, float32 or bfloat16")
    _add_rank_options(group)
    group.add_argument("--seed", type=int, default=0, help="of requests that bring none (default 0)")

    group = parser.add_argument_group(
        "capacity", "Left out, each is chosen from the model and the memory; the start-up line says what it became."
    )
    group.add_argument(
        "--max-model-len", "--context-length", dest="max_model_len", type=int, metavar="N", help="prompt + output of a request"
    )
    group.add_argument(
        "--max-num-seqs",
        "--max-running-requests",
        dest="max_num_seqs",
        type=int,
        default=64,
        metavar="N",
        help="streams in a step (default 64)",
    )
    rows_help = "rows of a step: tree nodes and prompt chunks together"
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help=rows_help)
    group.add_argument("--block-size", "--page-size", dest="block_size", type=int, metavar="N", help="tokens of a cache page (default 16)")
    group.add_argument(
        "--num-pages", "--num-gpu-blocks-override", dest="num_pages", type=int, metavar="N", help="cache pages (default: what fits)"
    )
    queue_help = "requests that may wait; one more gets 503 (default 1024)"
    group.add_argument("--max-num-queued-reqs", "--max-queued-requests", dest="max_num_queued_reqs", type=int, metavar="N", help=queue_help)
    tokens_help = "prompt tokens that may wait; a request that would add to more gets 503 (default: no limit)"
    group.add_argument("--max-num-queued-tokens", dest="max_num_queued_tokens", type=int, metavar="N", help=tokens_help)
    deadline_help = "seconds that a step may take; after that the engine counts as hung and the server exits with 1 (default 120)"
    group.add_argument("--watchdog-timeout", dest="watchdog_timeout", type=float, metavar="S", help=deadline_help)
    policy_help = "who is served first: fcfs (default), or priority: a request's `priority`, the lowest first"
    group.add_argument("--scheduling-policy", choices=POLICIES, default="fcfs", help=policy_help)
    target_help = "mean time of an output token that admission and prompt chunks hold (needs --tree-budget auto, or no speculation)"
    group.add_argument("--tpot-target-ms", type=float, metavar="MS", help=target_help)
    caching = group.add_mutually_exclusive_group()
    caching.add_argument(
        "--enable-prefix-caching", dest="prefix_caching", action="store_true", default=True, help="reuse prompts' pages (default)"
    )
    caching.add_argument(
        "--no-enable-prefix-caching", "--disable-radix-cache", dest="prefix_caching", action="store_false", help="compute each prompt anew"
    )
    _add_gpu_options(parser)
    _add_speculation_options(parser)


def _add_rank_options(group: argparse._ArgumentGroup) -> None:
    tp_help = "ranks that share the weights (default 1)"
    group.add_argument(
        "--tensor-parallel-size", "-tp", "--tp-size", "--tp", dest="tensor_parallel_size", type=int, default=1, metavar="N", help=tp_help
    )
    names = ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp")
    pp_help = "stages of layers, N ranks each, a host each where Ray has several; a step passes them in turn (default 1)"
    group.add_argument(*names, dest="pipeline_parallel_size", type=int, default=1, metavar="P", help=pp_help)
    group.add_argument(
        "--distributed-executor", default="local", choices=("local", "ray"), help="who starts the other ranks: this process or Ray"
    )


def _add_gpu_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("GPU", "Without one these change nothing, but for sizes, which are refused.")
    memory_help = "share of the device's memory for weights, buffers and pages (default 0.9)"
    group.add_argument(
        "--gpu-memory-utilization", "--mem-fraction-static", dest="gpu_memory_utilization", type=float, metavar="X", help=memory_help
    )
    group.add_argument(
        "--cudagraph-capture-sizes",
        "--cuda-graph-bs",
        dest="cudagraph_capture_sizes",
        type=int,
        nargs="+",
        metavar="M",
        help="rows of the steps that are captured (default 1 2 4 8 16 24 32 … 1024)",
    )
    group.add_argument("--enforce-eager", "--disable-cuda-graph", dest="enforce_eager", action="store_true", help="launch kernel by kernel")
    invariant_help = "one configuration of every kernel: what shares a step with a row does not change its bits"
    group.add_argument("--batch-invariant", action="store_true", help=invariant_help)


def _add_speculation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "speculation", "Drafts never change the text, only the speed. Give the JSON form, or the short flags, not both."
    )
    example = """'{"method": "ddtree", "tree_budget": 16}'"""
    group.add_argument(
        "--speculative-config", metavar="JSON", help=f"for example {example}; keys: method, model, num_speculative_tokens, tree_budget"
    )
    method_help = "ddtree: a tree of drafts; dflash: a chain; none; auto (default): ddtree if the model has a drafter"
    group.add_argument(
        "--spec-method", "--speculative-algorithm", dest="spec_method", type=str.lower, choices=METHODS, default=None, help=method_help
    )
    group.add_argument(
        "--spec-model",
        "--speculative-draft-model-path",
        dest="spec_model",
        metavar="PATH",
        help="drafter's folder (default: MODEL/drafter)",
    )
    group.add_argument("--spec-tokens", dest="spec_tokens", type=int, metavar="N", help="greatest depth (default: the drafter's)")
    budget_help = "nodes of a tree without its root, or auto: chosen at each step (default: what suits the backend)"
    group.add_argument("--tree-budget", type=_nodes, metavar="N|auto", help=budget_help)


def _nodes(text: str) -> int | str:
    return text if text == "auto" else int(text)


def model_of(args: argparse.Namespace) -> str:
    """The model named by position or by flag. Raises OptionError if both name different ones."""
    given = {name for name in (args.model, args.model_flag) if name is not None}
    if len(given) > 1:
        raise OptionError(f"model: {args.model!r} by position, but --model {args.model_flag!r}; give one")
    return str(given.pop()) if given else "demo"


def speculative_of(args: argparse.Namespace) -> dict[str, Any] | str | None:
    """What `runtime.load` takes as speculative_config. Raises OptionError where flags do not go together."""
    short = {"--spec-model": args.spec_model, "--spec-tokens": args.spec_tokens, "--tree-budget": args.tree_budget}
    used = [name for name, value in {"--spec-method": args.spec_method, **short}.items() if value is not None]
    if args.speculative_config is not None:
        if used:
            raise OptionError(f"--speculative-config together with {', '.join(used)}; give one form")
        text: str = args.speculative_config
        return text
    method = args.spec_method or "auto"
    if method == "none":
        if len(used) > 1:
            raise OptionError(f"--spec-method none together with {', '.join(name for name in used if name != '--spec-method')}")
        return None
    if method == "auto":
        if len(used) == 0 and not has_drafter(model_of(args), args.load_format == "dummy"):
            return None
        method = "ddtree"
    config = {"method": method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens, "tree_budget": args.tree_budget}
    return {name: value for name, value in config.items() if value is not None}


def has_drafter(model: str, dummy: bool = False) -> bool:
    """Whether the model's folder holds a drafter. dummy: as `runtime.loading.config_file`'s."""
    from runtime.loading import config_file

    return (config_file(model, dummy).parent / "drafter" / "config.json").is_file()


def layers_of(model: str, dummy: bool = False) -> int | None:
    """Layers that will be loaded, for a progress bar; None if the config does not say."""
    from runtime.loading import config_file

    config = json.loads(config_file(model, dummy).read_text(encoding="utf-8"))
    layers = (config.get("text_config") or config).get("num_hidden_layers")
    return layers if isinstance(layers, int) else None


def load_from(args: argparse.Namespace, progress: Callable[[str], None] = lambda _: None, **changes: Any) -> Loaded:
    """Loads what the options name; `changes` overrides keyword arguments of runtime.load."""
    from runtime.api import load

    return load(model_of(args), **{**load_options(args), "progress": progress, **changes})


def load_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options as keyword arguments of runtime.load."""
    return {
        "served_model_name": args.served_model_name,
        "speculative_config": speculative_of(args),
        "load_format": args.load_format,
        "hf_overrides": args.hf_overrides,
        "backend": args.backend,
        "dtype": args.dtype,
        "tensor_parallel_size": args.tensor_parallel_size,
        "pipeline_parallel_size": args.pipeline_parallel_size,
        "distributed_executor": args.distributed_executor,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "enable_prefix_caching": args.prefix_caching,
        "block_size": args.block_size,
        "num_pages": args.num_pages,
        "max_num_queued_reqs": args.max_num_queued_reqs,
        "max_num_queued_tokens": args.max_num_queued_tokens,
        "step_deadline_s": args.watchdog_timeout,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "cudagraph_capture_sizes": args.cudagraph_capture_sizes,
        "enforce_eager": args.enforce_eager,
        "batch_invariant": args.batch_invariant,
        "scheduling_policy": args.scheduling_policy,
        "tpot_target_ms": args.tpot_target_ms,
        "seed": args.seed,
    }
