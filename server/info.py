"""What the server says about itself: /server_info, /health_generate, and the figures behind /dashboard."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response

from runtime.stats import EngineStats, by_power
from runtime.types import SamplingParams
from server.answer import json_response, new_id
from server.errors import ApiError
from server.service import Service


def server_info(service: Service, version: str) -> Response:
    """What was loaded and with which options; keys and key files are not among them.

    internal_states[0].avg_spec_accept_length is where SGLang's benchmark looks.
    """
    loaded = service.loaded
    if loaded is None:
        return json_response({"version": version, "status": "loading", "options": service.options}, 503)
    stats = loaded.engine.stats()
    accepted_length = 1 + stats.accepted_tokens / stats.drafts if stats.drafts else None
    return json_response(
        {
            "version": version,
            "status": "draining" if service.draining else "serving",
            "model": loaded.name,
            "summary": loaded.summary,
            "max_model_len": loaded.max_model_len,
            "vocab_size": loaded.vocab_size,
            "draft_depth": loaded.draft_depth,
            "uptime_s": int(time.time()) - service.started_s,
            "options": service.options,
            "internal_states": [{"avg_spec_accept_length": accepted_length, "num_running_reqs": stats.running}],
        }
    )


async def health_generate(service: Service) -> Response:
    """200 once one token has been generated, 503 if that fails or takes longer than limits.probe_timeout_s.

    A full queue is 200 too ("busy"): there are steps, and whoever restarts a busy server makes it worse.
    """
    loaded = service.ready(None, generates=False)
    if loaded.engine.full:
        return json_response({"status": "busy"})
    params = SamplingParams(temperature=0.0, max_tokens=1)
    requests = service.make_requests(loaded, new_id("probe"), loaded.tokenizer.encode("a"), params, None, "prompt")
    generation = service.start(loaded, requests)
    start_s = time.monotonic()
    try:
        async with asyncio.timeout(service.limits.probe_timeout_s):
            async for _ in generation.batches():
                pass
    except TimeoutError:
        raise ApiError(503, f"no token within {service.limits.probe_timeout_s:g} s") from None
    finally:
        generation.close()
    return json_response({"status": "ok", "ms": round((time.monotonic() - start_s) * 1e3, 1)})


def dashboard_figures(service: Service) -> Response:
    """Counters and gauges of the engine as JSON; the page makes rates of two of these."""
    loaded = service.loaded
    if loaded is None:
        return json_response({"status": "loading"})
    status = "dead" if service.trouble() is not None else "draining" if service.draining else "serving"
    return json_response({"status": status, "model": loaded.name, "summary": loaded.summary, **figures(loaded.engine.stats())})


def figures(stats: EngineStats) -> dict[str, Any]:
    return {
        "at_s": time.monotonic(),
        "running": stats.running,
        "waiting": stats.waiting,
        "kv": {"total": stats.pages_total, "used": stats.pages_used, "kept": stats.pages_kept},
        "steps": stats.steps,
        "rows": stats.rows,
        "step_ms": stats.step_ms_ema,
        "experts": {"total": stats.experts_total, "sum": stats.experts_sum, "steps": stats.experts_steps},
        "threshold": stats.threshold,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix": {"queries": stats.prefix_queries, "hits": stats.prefix_hits},
        "drafts": stats.drafts,
        "draft_tokens": stats.draft_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "accepted_per_position": stats.accepted_per_position,
        "buckets": [
            {"rows": rows, "steps": steps, "seconds": by_power(stats.bucket_s).get(rows, 0.0)}
            for rows, steps in by_power(stats.bucket_steps).items()
        ],
        "budget": {"steps": stats.budget_steps, "expected": stats.expected_tokens, "realised": stats.realised_tokens},
        "stage_s": stats.stage_s,
        "finished": dict(stats.finished),
        "rejected": stats.rejected,
        "corrupted": stats.corrupted_requests,
        "preemptions": stats.preemptions,
    }
