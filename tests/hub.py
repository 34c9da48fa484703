"""A model hub on loopback that counts what is asked for, and a tiny model for it to serve."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789" * 4
REVISIONS = ("main", "v1", COMMIT)  # all of them the one commit


@dataclass
class Hub:
    """What was asked for since the start, and how many bytes of it were sent."""

    folder: Path | None
    """Files of the one model; None has nothing."""
    refusal: tuple[int, str] | None = None
    """Status and error code of every answer about a model, such as (403, "GatedRepo")."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """`/api/models/<model>` with `/revision/` or `/tree/`, and `/<model>/resolve/<revision>/<file>`, as
        huggingface_hub asks for them."""

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            if path == "/":
                return self._answer(200, b"")
            if hub.refusal is not None or hub.folder is None:
                return self._refuse(*(hub.refusal or (404, "RepoNotFound")))
            if path.startswith("/api/models/"):
                return self._about(hub.folder, path)
            name = path.partition("/resolve/")[2].partition("/")[2]
            file = hub.folder / name
            if not name or not file.is_file():
                return self._refuse(404, "EntryNotFound")
            data = file.read_bytes()
            self._answer(200, data, ETag=f'"{hashlib.sha256(data).hexdigest()}"')
            if self.command == "GET":
                hub.sent[name] = hub.sent.get(name, 0) + len(data)

        do_HEAD = do_GET

        def _about(self, folder: Path, path: str) -> None:
            revision = path.replace("/tree/", "/revision/").partition("/revision/")[2] or "main"
            if revision not in REVISIONS:
                return self._refuse(404, "RevisionNotFound")
            files = [(file.name, file.stat().st_size) for file in sorted(folder.iterdir())]
            said: object = {"id": "a/b", "sha": COMMIT, "siblings": [{"rfilename": n, "size": s} for n, s in files]}
            if "/tree/" in path:
                said = [{"type": "file", "path": name, "size": size, "oid": "0" * 40} for name, size in files]
            self._answer(200, json.dumps(said).encode())

        def _refuse(self, status: int, code: str) -> None:
            self._answer(status, b"", **{"X-Error-Code": code})

        def _answer(self, status: int, body: bytes, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextmanager
def serving(folder: Path | None) -> Iterator[Hub]:
    """A hub that ends with the block; `HF_ENDPOINT` is its `url`."""
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_tiny_model(folder: Path) -> None:
    """Random weights and a tokenizer of single bytes, in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), eos_token_id=0, pad_token_id=0, bos_token_id=None, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
