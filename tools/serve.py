"""Serves a model over HTTP: `python tools/serve.py --help`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from runtime import __version__
from runtime.env import load_env
from runtime.trace import StepTrace
from server.config_file import parse_with_config
from server.habits import BriefParser, add_habits
from server.lifecycle import HttpServer, ServeOptions
from server.limits import Limits
from server.metrics import PREFIXES, Metrics
from server.options import OptionError, WideHelp, add_model_options, layers_of, load_from, load_options, model_of, speculative_of
from server.service import Service

if TYPE_CHECKING:
    from runtime.api import Loaded

HELP = """\
Serves OpenAI's API: /v1/completions, /v1/chat/completions, /v1/responses (all with streaming), /v1/models, and Anthropic's /v1/messages;
/tokenize, /detokenize, /health, /ready, /metrics, /server_info, a live page at /dashboard. /openapi.json lists all of it.
Without a model it serves the demo. It listens on 127.0.0.1:8000, takes requests from the moment the port is bound (/health says 503
while the model loads), and on SIGTERM finishes what is under way before it exits; a second signal ends it at once.
"""

EXAMPLES = """\
examples:
  the demo model, with the speculation it comes with
    python tools/serve.py
  a checkpoint, a chain of drafts in place of a tree
    python tools/serve.py /models/kimi-k2.6 --spec-method dflash --spec-tokens 7
  open to other machines, behind a key (clients send Authorization: Bearer KEY)
    RUNTIME_API_KEY=… python tools/serve.py --host 0.0.0.0
  a model over two hosts, eight GPUs each; the same on both but for the last number, and node 0 serves
    RUNTIME_STAGE_TOKEN=… python tools/serve.py /models/kimi-k2.6 -tp 8 -pp 2 --master-addr 10.0.0.1:5000 --node-rank 0
  how well drafts are accepted, in every answer
    python tools/serve.py --per-request-spec-decode-metrics summary

exit codes: 0 stopped by a signal · 1 the engine died · 2 an option, the model or the port is not usable · 128+N by a second signal N
"""


REASONING_NAMES = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
SECRET = ("api_key", "api_key_file", "ssl_keyfile")  # never shown by /server_info


def port_number(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise ValueError
    return port


def make_parser() -> argparse.ArgumentParser:
    parser = BriefParser("python tools/serve.py", description=HELP, epilog=EXAMPLES, formatter_class=WideHelp, allow_abbrev=False)
    add_model_options(parser)
    config_help = "options in YAML, written as these flags without their dashes; the command line wins"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config_help)
    group = parser.add_argument_group("http")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 opens it to other machines (default 127.0.0.1)")
    group.add_argument("--port", type=port_number, default=8000, metavar="PORT", help="0 takes a free one (default 8000)")
    group.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help="asked of every request but /health and /ready; repeatable"
    )
    group.add_argument("--api-key-file", type=Path, metavar="PATH", help="more keys, one a line")
    group.add_argument("--ssl-certfile", metavar="PATH", help="serve TLS with this certificate")
    group.add_argument("--ssl-keyfile", metavar="PATH", help="its key")
    group.add_argument("--ssl-ca-certs", metavar="PATH", help="ask clients for a certificate of these authorities")
    origins_help = "web pages that may call the server from a browser, '*' for all; repeatable (default none)"
    group.add_argument("--allowed-origins", action="append", default=[], metavar="ORIGIN", help=origins_help)
    drain_help = "seconds that requests under way have on SIGTERM (default 60)"
    group.add_argument("--shutdown-timeout", type=float, default=60.0, metavar="S", help=drain_help)
    beat_help = "silence after which a stream gets a comment (default 15)"
    group.add_argument("--sse-keep-alive-interval", type=float, default=15.0, metavar="S", help=beat_help)
    group.add_argument(
        "--max-body-bytes", type=int, default=Limits().max_body_bytes, metavar="N", help="larger requests get 413 (default 8 MiB)"
    )
    reasoning_help = "what a chat's reasoning is called in answers (default reasoning_content; both are understood in requests)"
    group.add_argument("--reasoning-field", choices=tuple(REASONING_NAMES), default="reasoning_content", help=reasoning_help)
    timeout_help = "seconds that a request may take, waiting included; then it ends with a 504 (default: no limit)"
    group.add_argument("--request-timeout", type=float, default=0.0, metavar="S", help=timeout_help)
    group.add_argument("--access-log", action="store_true", help="one line for each request")
    group = parser.add_argument_group(
        "nodes", "A model over several hosts, each started by hand with the same options; Ray starts them itself."
    )
    address_help = "where node 0 waits for the others; all need the same RUNTIME_STAGE_TOKEN"
    group.add_argument("--master-addr", "--dist-init-addr", dest="master_addr", metavar="HOST:PORT", help=address_help)
    group.add_argument("--nnodes", type=int, metavar="P", help="hosts, a stage each (default: as many as stages)")
    group.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is; node 0 serves (default 0)")
    _add_observation(parser)
    add_habits(parser)
    return parser


def _add_observation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("observation")
    log_help = "seconds between two lines about throughput, queue, cache and speculation in the log; 0 for none (default 10)"
    group.add_argument("--log-stats-interval", type=float, default=10.0, metavar="S", help=log_help)
    group.add_argument("--disable-log-stats", dest="log_stats_interval", action="store_const", const=0.0, help="the same as 0")
    trace_help = "write every step and its stages there, for ui.perfetto.dev (250 MB at most)"
    group.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)
    group.add_argument("--metrics-prefix", choices=sorted(PREFIXES), default="both", help="names in /metrics (default both)")
    detail_help = "metrics.speculative_decoding in answers with usage"
    group.add_argument("--per-request-spec-decode-metrics", choices=("none", "summary", "detailed"), default="none", help=detail_help)


class LoadingBar:
    """A bar over the model's layers on a terminal; nothing where nobody looks."""

    def __init__(self, total: int | None) -> None:
        self._bar = tqdm(total=total, desc="Loading", unit="part", disable=None, leave=False, file=sys.stderr)

    def __call__(self, what: str) -> None:
        self._bar.set_postfix_str(what)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def read_keys(args: argparse.Namespace) -> tuple[str, ...]:
    """Keys of the flags, the file and RUNTIME_API_KEY. Raises ValueError for a blank one."""
    keys = list(args.api_key)
    if args.api_key_file is not None:
        keys += [line.strip() for line in args.api_key_file.read_text(encoding="utf-8").splitlines() if line.strip()]
        if not keys:
            raise OptionError(f"--api-key-file {args.api_key_file}: holds no key; the server would be open")
    key = load_env().api_key
    if key is not None:
        keys.append(key)
    if any(not key.strip() for key in keys):
        raise OptionError("--api-key: blank; leave it out to serve without a key")
    return tuple(keys)


def origins_of(given: list[str]) -> tuple[str, ...]:
    """--allowed-origins as single words or as vLLM's JSON list. Raises OptionError for what is no origin."""
    origins: list[str] = []
    for text in given:
        found = json.loads(text) if text.startswith("[") else [text]
        origins += found
    for origin in origins:
        if not isinstance(origin, str) or not re.fullmatch(r"\*|https?://[^/\s]+", origin):
            raise OptionError(f"--allowed-origins: {origin!r} is neither '*' nor like https://example.org")
    return tuple(origins)


def announce(loaded: Loaded, url: str, keys: tuple[str, ...]) -> None:
    auth = " -H 'Authorization: Bearer KEY'" if keys else ""
    message = '{"messages": [{"role": "user", "content": "Write a Python function that adds two numbers."}]}'
    print(loaded.summary, flush=True)
    print(f"{loaded.name} at {url} · curl {url}/v1/chat/completions{auth} -H 'Content-Type: application/json' -d '{message}'", flush=True)


def serve(args: argparse.Namespace) -> int:
    """Serves until stopped; returns the exit code. Raises ValueError, FileNotFoundError or OSError for what is not usable."""
    keys = read_keys(args)
    speculative_of(args)  # contradictions before the port is bound
    limits = Limits(max_body_bytes=args.max_body_bytes, keep_alive_s=args.sse_keep_alive_interval, request_timeout_s=args.request_timeout)
    options = {name: value if isinstance(value, (int, float, str, type(None))) else str(value) for name, value in vars(args).items()}
    shown = {name: value for name, value in options.items() if name not in SECRET}
    service = Service(
        Metrics(args.metrics_prefix), limits, args.per_request_spec_decode_metrics, REASONING_NAMES[args.reasoning_field], options=shown
    )
    bar = LoadingBar(layers_of(model_of(args), args.load_format == "dummy"))

    trace = None if args.trace is None else StepTrace(args.trace)

    def load() -> Loaded:
        loaded = load_from(args, bar, nnodes=args.nnodes, master_addr=args.master_addr)
        loaded.engine.trace_to(trace)
        loaded.engine.start()
        return loaded

    def loaded(made: Loaded) -> None:
        bar.close()
        announce(made, url, keys)

    where = ServeOptions(
        host=args.host,
        port=args.port,
        keys=keys,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.access_log,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        origins=origins_of(args.allowed_origins),
        version=__version__,
        log_stats_s=args.log_stats_interval,
    )
    server = HttpServer(service, where, load, loaded)
    server.catch_signals()
    url = server.bind()
    if args.host not in ("127.0.0.1", "::1", "localhost") and not keys:
        logging.getLogger("server").warning("listening on %s without a key: whoever reaches this port can use the model", args.host)
    try:
        return server.run()
    finally:
        bar.close()
        if trace is not None:
            trace.close()


def follow(args: argparse.Namespace) -> int:
    """Holds one stage of the model that node 0 serves, until that stops; returns the exit code. Raises as `serve`."""
    from runtime.chosen import follow_node
    from runtime.lives import RankFailed
    from runtime.stage_link import StageLost

    log = logging.getLogger("server")

    def ask_again(number: int, frame: object) -> None:
        log.warning("this node ends when node 0 does; a second signal ends it now")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):  # a service manager sends them to all nodes, and node 0 drains first
        signal.signal(number, ask_again)
    try:
        stage = follow_node(model_of(args), args.node_rank, nnodes=args.nnodes, master_addr=args.master_addr, **load_options(args))
        log.info("stage %d is loaded", args.node_rank)
        stage.follow()
    except (StageLost, RankFailed) as failed:
        log.error("%s", failed)
        return 1
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        args = parse_with_config(make_parser(), sys.argv[1:] if argv is None else argv)
        logging.basicConfig(level=load_env().log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        return follow(args) if args.node_rank else serve(args)
    except (ValueError, OSError) as error:
        logging.getLogger("server").debug("serve failed", exc_info=True)
        print(f"serve: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    if code == 1:  # the engine is dead: nothing that it left in the process may hold up the end
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
