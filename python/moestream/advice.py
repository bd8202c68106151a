"""What a caller could do better, said once, as a warning of the logger "moestream".

Never changes anything, and never says the same of a context twice.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moestream.sizes import format_bytes

if TYPE_CHECKING:
    from moestream.context import Context

_logger = logging.getLogger("moestream")


def long_prompt(context: Context, n_tokens: int) -> None:
    """A prompt computed in several pieces reads nearly all experts for each of them if the cache does not hold them."""
    plan, pieces = context.model.plan, -(-n_tokens // context.n_ubatch)
    n_unused = (1 - plan.n_expert_used / plan.n_expert) ** context.n_ubatch if plan.n_expert else 1.0
    cache = context.model.stats()["cache_bytes"]
    if pieces < 2 or n_unused > 0.5 or cache > 0.9 * plan.full_cache_bytes:
        return
    larger = f"n_ubatch (up to n_batch={context.n_batch})"
    if context.n_ubatch >= context.n_batch:  # llama.cpp takes the smaller of both
        larger = f"n_ubatch together with n_batch (now {context.n_batch})"
    _logger.warning(
        "%d tokens are computed in %d pieces of n_ubatch=%d, and each reads most of the %s of experts again: a larger "
        "%s reads them fewer times, and takes more memory for the computation",
        n_tokens, pieces, context.n_ubatch, format_bytes(plan.expert_bytes), larger,
    )  # fmt: skip
    context.advised = True
