#!/usr/bin/env python3
"""Replicas of the server behind one address, through Ray Serve: `python tools/serve_ray.py MODEL --replicas 4`.

Each replica is a whole engine; with --tensor-parallel-size its ranks are processes beside it, on the same host. Ray Serve spreads
requests over replicas, replaces those whose health check fails, and drains on redeployment. Needs `pip install 'ray[serve]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from runtime import __version__
from server.options import WideHelp, add_model_options

EXAMPLES = """\
examples
  python tools/serve_ray.py demo --replicas 2
  RAY_ADDRESS=auto python tools/serve_ray.py /models/Kimi-K2.6 --replicas 4 --tensor-parallel-size 8 --gpus-per-replica 8
"""


def make_application(args: argparse.Namespace) -> Any:
    """The Ray Serve application of the parsed options."""
    from ray import serve

    own = ("replicas", "cpus_per_replica", "gpus_per_replica", "host", "port", "max_ongoing_requests")
    values = {name: value for name, value in vars(args).items() if name not in own}
    for name in ("model", "model_flag", "spec_model"):  # a replica has a working directory of its own
        if values[name] and Path(values[name]).exists():
            values[name] = str(Path(values[name]).resolve())
    options = json.dumps(values)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    def build_app() -> Any:
        from server.replica import open_replica

        return open_replica(options, __version__).app

    class Threshold:
        def check_health(self) -> None:
            from server.replica import open_replica

            open_replica(options, __version__).check_health()

    actor: dict[str, Any] = {"num_cpus": args.cpus_per_replica, "num_gpus": args.gpus_per_replica}
    deployment = serve.deployment(
        num_replicas=args.replicas,
        max_ongoing_requests=args.max_ongoing_requests,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=60.0,
        ray_actor_options={**actor, "runtime_env": {"env_vars": {"PYTHONPATH": path}}},
    )
    return deployment(serve.ingress(build_app)(Threshold)).bind()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES, formatter_class=WideHelp)
    add_model_options(parser)
    group = parser.add_argument_group("replicas")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="engines behind the address (default 1)")
    group.add_argument("--cpus-per-replica", type=float, default=1.0, metavar="N", help="CPUs that Ray reserves for each (default 1)")
    group.add_argument("--gpus-per-replica", type=int, default=0, metavar="N", help="GPUs for each: the tensor-parallel size (default 0)")
    group.add_argument("--max-ongoing-requests", type=int, default=256, metavar="N", help="requests in a replica; more wait (default 256)")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(default 8000)")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    from ray import serve

    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(make_application(args), name="threshold", route_prefix="/")
    print(f"{args.replicas} replica(s) at http://{args.host}:{args.port}", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
