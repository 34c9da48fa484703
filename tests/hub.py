"""A model hub on loopback that counts what is asked for, and a tiny model for it to serve."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789" * 4


@dataclass
class Hub:
    """What was asked for since the start, and how many bytes of it were sent."""

    folder: Path | None
    """Files of the one model; None has nothing."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """`/<model>/resolve/<revision>/<file>`, as huggingface_hub asks for it."""

        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            _, found, rest = self.path.partition("/resolve/")
            name = rest.partition("/")[2].partition("?")[0]
            path = hub.folder / name if found and hub.folder is not None else None
            if path is None or not path.is_file():
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                hub.sent[name] = hub.sent.get(name, 0) + len(data)
                self.wfile.write(data)

        do_HEAD = do_GET

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
