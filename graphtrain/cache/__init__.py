"""Cache of compiled programs: immutable files named by digest, verified before use.

May import `graphtrain.errors`, `graphtrain.files` and `lowering.artifact`, and no compiler, since
a warm start waits for it.
"""

from graphtrain.cache.collect import CollectionResult
from graphtrain.cache.entries import CacheEntry
from graphtrain.cache.explain import Explanation, Neighbour
from graphtrain.cache.programs import CacheWarning
from graphtrain.cache.store import Cache, default_root
from graphtrain.cache.verify import Problem, VerificationReport

__all__ = [
    "Cache",
    "CacheEntry",
    "CacheWarning",
    "CollectionResult",
    "Explanation",
    "Neighbour",
    "Problem",
    "VerificationReport",
    "default_root",
]
