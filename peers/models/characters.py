"""The tokenizer of the built-in model: one id a character."""

import hashlib
import itertools
import string
from collections.abc import Mapping, Sequence
from types import MappingProxyType

PAD, BOS, EOS, UNKNOWN = range(4)
CHARACTERS = "".join(sorted(string.digits + string.ascii_letters + string.punctuation + " \n"))
_FIRST = UNKNOWN + 1
_IDS = {character: _FIRST + i for i, character in enumerate(CHARACTERS)}
_TEXTS = {i: character for character, i in _IDS.items()} | dict.fromkeys((PAD, BOS, EOS), "")


class CharacterTokenizer:
    """Printable ASCII and newline. A prompt starts with BOS; any other character becomes UNKNOWN."""

    eos_ids = frozenset({EOS})
    pad_id = PAD
    vocab_size = _FIRST + len(CHARACTERS)
    chat_template = ""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    digest = hashlib.sha256(f"echo-swarm/2/characters\0{_FIRST}\0{CHARACTERS}".encode()).digest()

    def encode(self, text: str) -> tuple[int, ...]:
        """BOS, then one id a character."""
        return (BOS, *self.encode_rendered(text))

    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """One id a character."""
        return tuple(_IDS.get(character, UNKNOWN) for character in text)

    def decode(self, ids: Sequence[int]) -> str:
        """PAD, BOS and EOS vanish; UNKNOWN and ids out of range become U+FFFD."""
        return "".join(map(_TEXTS.get, ids, itertools.repeat("\ufffd")))
