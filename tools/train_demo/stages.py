"""The stages of a training run, in order, under one clock; what a stage makes is kept, so that a later run goes on from there."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.tiny_vocab import DEMO
from model.tokenizer import Tokenizer
from tools.train_demo import acceptance, card, corpus, decode, export, settings, shape
from tools.train_demo.chats import Conversation
from tools.train_demo.corpus import Corpus, render
from tools.train_demo.decode import Texts
from tools.train_demo.drafting import Drafter
from tools.train_demo.fit_drafter import AGAIN_RATE, PEAK_RATE, fit_drafter
from tools.train_demo.fit_target import Rows, fit_target, held_out_loss
from tools.train_demo.network import Target
from tools.train_demo.optimise import Clock

HERE = Path(__file__).parent
HELD_PROMPTS = HERE.parents[1] / "tests" / "fixtures" / "heldout_prompts.json"
SHORTEST_STAGE = 5.0  # seconds
CALLS = "calls.json"


class Run:
    """One run: arguments, clock (it began at time.monotonic() = `began`), log, report; `go` walks the stages."""

    def __init__(self, args: argparse.Namespace, began: float) -> None:
        self.began = began
        self.args = args
        self.settings = settings.MINIATURE if args.miniature else settings.FULL
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.report: dict[str, Any] = {"seconds": {}, "errors": [], "seed": args.seed, "minutes": args.budget_minutes}
        self.report |= {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
        self.report["device"] = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        for folder in (args.out, args.work, *([args.pack] if args.pack else [])):
            folder.mkdir(parents=True, exist_ok=True)
        self.report["calls"] = [*self._calls_before(), self.report["seconds"]]
        torch.manual_seed(args.seed)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, and evaluation has many
        self.tokenizer = Tokenizer.load(DEMO)
        self.stops = sorted(self.tokenizer.eos_ids)
        self.pad = self.tokenizer.special["[PAD]"]
        self.rows: Rows

    def _calls_before(self) -> list[dict[str, float]]:
        """Seconds by stage of the calls whose products this one goes on from."""
        kept = self.args.work / CALLS
        if kept.exists():
            return list(json.loads(kept.read_text()))
        source = self.args.from_export
        return list(json.loads((source / card.RECORD).read_text())["calls"]) if source else []

    def log(self, line: str) -> None:
        text = f"[{time.monotonic() - self.began:6.1f}] {line}"
        print(text, flush=True)
        with ((self.args.pack or self.args.work) / "train.log").open("a") as file:
            file.write(text + "\n")

    @property
    def left(self) -> float:
        """Seconds for the stages that train, with the reserve for what comes after them taken off."""
        return self.args.budget_minutes * 60 - (time.monotonic() - self.began) - self.settings.reserve_seconds

    def go(self) -> dict[str, Any]:
        a = self.args
        self.log(f"{self.report['device']}, torch {torch.__version__}, {a.budget_minutes} minutes")
        data = self._timed("data", self.data)
        if a.stop_after == "data":
            return self.report
        try:
            self._train(data)
        except Exception as error:  # what stands already must still come back
            self.report["errors"].append(repr(error))
            self.log(traceback.format_exc())
        self._guarded("card", lambda: card.write(self.report, a.out))
        if a.pack:
            self._guarded("pack", lambda: card.pack(a.out, a.pack))
        self.report["seconds"]["all"] = round(time.monotonic() - self.began, 1)
        export.write_json(self.args.work / CALLS, self.report["calls"])
        export.write_json((a.pack or a.work) / "report.json", self.report)
        return self.report

    def _train(self, data: Corpus) -> None:
        stop = self.args.stop_after
        target = self._timed("target", lambda: self.target(self.left * self.settings.target_share))
        if stop == "target":
            return
        texts = self._timed("texts", lambda: self.texts(target, data, self.left * self.settings.texts_share))
        if stop == "texts":
            return
        drafter = self._timed("drafter", lambda: self.drafter(target, texts, self.left))
        if stop != "drafter":
            self._guarded("evaluate", lambda: self.evaluate(target, drafter))

    def _timed(self, name: str, stage: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = stage()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.report["seconds"][name] = round(time.monotonic() - began, 1)
        self.log(f"{name}: {self.report['seconds'][name]} s")
        return result

    def _guarded(self, name: str, stage: Callable[[], Any]) -> None:
        """A stage whose failure must not lose what was trained."""
        try:
            self._timed(name, stage)
        except Exception as error:
            self.report["errors"].append(f"{name}: {error!r}")
            self.log(traceback.format_exc())

    def data(self) -> Corpus:
        path = self.args.work / "tokens.npz"
        if not path.exists():
            made, manifest = corpus.prepare(self.args.archive, self.args.packages, DEMO, self.args.processes)
            corpus.save(made, manifest, path)
        made, self.report["data"] = corpus.load(path)
        self.rows = Rows(made, self.device, self.args.seed)
        self.log(json.dumps(self.report["data"]["tokens"]))
        return made

    def target(self, seconds: float) -> Target:
        """The frozen target: read back if it stands, else trained and exported."""
        done, source = self.args.work / "target.json", self.args.from_export
        if source is not None or done.exists():
            target = export.read_target(source or self.args.out).to(self.device)
            self.report["target"] = json.loads((source / card.RECORD).read_text())["target"] if source else json.loads(done.read_text())
            if source is not None:
                export.write_target(target, json.loads((source / "config.json").read_text()), self.args.out)
        else:
            config = shape.target_json(self.settings.target)
            target = Target(shape.read_target(config)).to(self.device)
            clock = Clock(max(seconds, SHORTEST_STAGE))
            told = fit_target(target, self.rows, clock, self.log, self.settings.steps, not self.args.no_compile)
            target.freeze()
            told |= {
                "parameters": sum(p.numel() for p in target.parameters()),
                "tokens_per_second": round(told["tokens"] / told["seconds"]),
            }
            told["bytes"] = export.write_target(target, config, self.args.out)
            self.report["target"] = told
            export.write_json(done, told)
        self.report["losses"] = {"this": self.held_out(target)}
        self.log(f"held-out loss as stored {self.report['losses']['this']}")
        return target

    def held_out(self, target: Target) -> dict[str, float]:
        return held_out_loss(target, self.rows, self.settings.steps.held_rows, self.settings.steps.held_length)

    def texts(self, target: Target, data: Corpus, seconds: float) -> Texts:
        path = self.args.work / "texts.pt"
        if path.exists():
            texts = Texts(*(part.long().to(self.device) for part in torch.load(path)))
        else:
            plan, until = self.settings.plan, time.monotonic() + seconds
            prompts = decode.Prompts(data, plan.longest_prompt, self.args.seed)
            texts = decode.write_many(target, prompts, plan, self.stops, self.pad, lambda: time.monotonic() < until)
            torch.save([texts.ids.short().cpu(), texts.prompt.cpu(), texts.end.cpu()], path)
        written = int((texts.end - texts.prompt).sum())
        self.report["texts"] = {"texts": len(texts), "tokens": written}
        self.log(f"{len(texts)} texts, {written / 1e6:.2f} million tokens written")
        return texts

    def drafter(self, target: Target, texts: Texts, seconds: float) -> Drafter:
        done = self.args.work / "drafter.json"
        if done.exists():
            drafter = export.read_drafter(self.args.out / "drafter").to(self.device)
            self.report["drafter"] = json.loads(done.read_text())
            drafter.freeze()
            return drafter
        target_json = json.loads((self.args.out / "config.json").read_text())
        config = shape.drafter_json(target_json, self.settings.drafter, self.settings.taps)
        drafter = Drafter(shape.read_drafter(config)).to(self.device)
        begun, before = self.args.from_export and self.args.from_export / "drafter", {}
        if begun and begun.exists() and json.loads((begun / "config.json").read_text()) == config:
            drafter.load_state_dict(export.read_drafter(begun).state_dict())
            before = json.loads((begun.parent / card.RECORD).read_text())["drafter"]
            self.log("the drafter goes on from the export")
        clock = Clock(max(seconds, SHORTEST_STAGE))
        told: dict[str, Any] = {"before": before} if before else {}
        peak, quick = AGAIN_RATE if before else PEAK_RATE, not self.args.no_compile
        told |= fit_drafter(drafter, target, texts, self.rows, clock, self.log, self.settings.sizes, quick, peak)
        told["parameters"] = sum(p.numel() for p in drafter.parameters())
        told["bytes"] = export.write_drafter(drafter, config, self.args.out / "drafter")
        self.report["drafter"] = told
        export.write_json(done, told)
        return drafter

    def evaluate(self, target: Target, drafter: Drafter) -> None:
        where = self.args.pack or self.args.work
        self.report["acceptance"], texts = self.judge(target, drafter, where / "draft_traces.npz")
        self.report["samples"] = acceptance.samples(texts, self.tokenizer, 20)
        self.log(json.dumps(self.report["acceptance"]))
        if self.args.compare:
            other = export.read_target(self.args.compare).to(self.device)
            other_drafter = export.read_drafter(self.args.compare / "drafter").to(self.device)
            self.report["losses"]["compared"] = self.held_out(other)
            self.report["compared"], _ = self.judge(other, other_drafter, self.args.work / "compared.npz")
            self.log(json.dumps({"losses": self.report["losses"], "compared": self.report["compared"]}))

    def judge(self, target: Target, drafter: Drafter, path: Path) -> tuple[dict[str, Any], Texts]:
        """Greedy answers to the held-out prompts of both kinds, and what the drafter offered along them."""
        s = self.settings
        asked = json.loads(HELD_PROMPTS.read_text("utf-8"))[: s.chat_prompts]
        chat = [self.prompt_of(entry["q"]) for entry in asked]
        text = [np.array(ids) for ids in json.loads((HERE / "text_prompts.json").read_text())["ids"]][: s.chat_prompts]
        arrays: dict[str, np.ndarray] = {}
        answers: list[Texts] = []
        for kind, prompts in (("chat", chat), ("text", text)):
            length = max(map(len, prompts)) + s.new_tokens
            texts = decode.write(target, prompts, length, torch.zeros(len(prompts)), self.stops, self.pad)
            found = acceptance.record(target, drafter, texts, length - min(map(len, prompts)))
            arrays |= {f"{kind}.{name}": value for name, value in found.items()}
            answers.append(texts)
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        return acceptance.judge(path, ("chat", "text")), answers[0]

    def prompt_of(self, question: str) -> np.ndarray:
        """The prompt of one question, without thinking."""
        ids, length = render(self.tokenizer, Conversation([{"role": "user", "content": question}, {"role": "assistant", "content": ""}]))
        return np.array(ids[:length])
