"""A server with vLLM's interface whose engine is the tiny pair: speculation for real, its counters as vLLM writes them."""

from __future__ import annotations

import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from tiny import DRAFT, tiny_target

from draftscope.eagle3.checkpoint import build_draft, load_checkpoint
from draftscope.eagle3.generate import generate
from draftscope.eagle3.generated import Generated
from draftscope.engines.transformers import Capture, description
from draftscope.target.wiring import Wiring

K = 3


class LiveServer:
    """Serves until closed; `url` is its address.

    Args:
        wiring: what the draft receives.
        draft: its checkpoint.
        capture: where its plugin captures, if it has one.
        engine: whose interface it has, `vllm` or `sglang`.
    """

    def __init__(self, wiring: Wiring, *, draft: Path = DRAFT, capture: Path | None = None, engine: str = "vllm") -> None:
        self.target = tiny_target()
        self.draft = build_draft(load_checkpoint(draft, target_layers=self.target.layers), self.target.parts)
        self.wiring, self.engine = wiring, engine
        self.steps, self.accepted, self.requests = 0, [0] * K, 0
        self.lock = Lock()
        self.capture = None
        if capture is not None:
            ids = [slot.index for slot in wiring.slots]
            self.capture = Capture(capture, description(model="tiny", draft=draft.name, layer_ids=ids, k=K))
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_GET(self) -> None:
                self.reply(*outer.page(self.path))

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.reply(json.dumps(outer.answer(asked)).encode(), 200)

            def reply(self, body: bytes, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
        if self.capture is not None:
            self.capture.close()

    def page(self, path: str) -> tuple[bytes, int]:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "tiny", "max_model_len": 256}]}).encode(), 200
        if path == "/version" and self.engine == "vllm":
            return b'{"version": "0.32.0"}', 200
        if path.startswith("/server_info") and self.engine == "sglang":
            return b'{"version": "0.5.23", "speculative_num_steps": 3, "speculative_eagle_topk": 1}', 200
        if path == "/metrics" and self.engine == "vllm":
            return self.metrics().encode(), 200
        return b"", 404

    def metrics(self) -> str:
        name, label = "vllm:spec_decode_num", 'engine="0",model_name="tiny"'
        counts = {"drafts": self.steps, "draft_tokens": K * self.steps, "accepted_tokens": sum(self.accepted)}
        lines = [f"{name}_{what}_total{{{label}}} {count:.1f}" for what, count in counts.items()]
        lines += [f'{name}_accepted_tokens_per_pos_total{{{label},position="{k}"}} {count:.1f}'
                  for k, count in enumerate(self.accepted)]
        return "\n".join(["# TYPE vllm:spec_decode_num_drafts counter", *lines]) + "\n"

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        sglang = self.engine == "sglang"
        ids = asked["input_ids"] if sglang else asked["prompt"]
        most = asked["sampling_params"]["max_new_tokens"] if sglang else asked["max_tokens"]
        with self.lock:
            number = self.requests
            self.requests += 1
            (done,) = generate(self.target, self.draft, [ids], wiring=self.wiring, k=K, max_new=most,
                               stop_ids=self.target.stop_ids, rows=1,
                               observer=None if self.capture is None else Renumbered(self.capture, number))
            self.steps += len(done.accepted_counts)
            for k in range(K):
                self.accepted[k] += sum(count > k for count in done.accepted_counts)
        text = self.target.tokenizer.decode(done.token_ids)
        if sglang:
            meta = {"finish_reason": {"type": "length"}, "spec_verify_ct": len(done.accepted_counts), "prompt_tokens": len(ids),
                    "completion_tokens": len(done.token_ids), "id": str(number)}
            return {"text": text, "output_ids": done.token_ids, "meta_info": meta}
        return {"choices": [{"text": text, "token_ids": done.token_ids, "finish_reason": "length"}]}


class Renumbered:
    """Hands the requests of many runs, each of one, to one capture under numbers of their own."""

    def __init__(self, capture: Capture, number: int) -> None:
        self.capture, self.number = capture, number

    def prefill(self, request: int, rows: Any) -> None:
        self.capture.prefill(self.number, rows)

    def step(self, request: int, rows: Any, accepted: int, drafted: Any, states: Any) -> None:
        self.capture.step(self.number, rows, accepted, drafted, states)

    def done(self, generated: Generated) -> None:
        self.capture.done(replace(generated, request=self.number))
