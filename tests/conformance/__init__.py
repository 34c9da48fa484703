"""What every engine must do alike, as checks that know no engine: they see the contract of `peers.engines` only.

    build(files, lora) -> Engine ---+
    model, prompts, sizes ----------+--> Subject --> check --> nothing, or Nonconforming, which says what is wrong
    trainer's computation, float32 -+    ^
                                         broken.py: engines with one fault each, which a check must find

The reference is the trainer's own: unmerged adapter, one full forward pass in float32, no cache, no padding to the
left. An engine is judged by it token for token along what the engine itself wrote, so a tie that falls the other way
costs one token and not the rest of the text.
"""

from tests.conformance.checks import CHECKS, LONG_CHECKS
from tests.conformance.reference import LIMITS, Agreement, Limits, Nonconforming, Reference
from tests.conformance.subject import FULL, SMALL, TINY, Size, Subject

__all__ = [
    "CHECKS",
    "FULL",
    "LIMITS",
    "LONG_CHECKS",
    "SMALL",
    "TINY",
    "Agreement",
    "Limits",
    "Nonconforming",
    "Reference",
    "Size",
    "Subject",
]
