"""Cache of compiled programs: immutable files named by digest, verified before use.

May import `graphtrain.errors`, `graphtrain.files` and `lowering.artifact`, and no compiler, since
a warm start waits for it.
"""

from graphtrain.cache.collect import Collected
from graphtrain.cache.entries import Entry
from graphtrain.cache.explain import Explanation, Neighbour
from graphtrain.cache.programs import CacheWarning
from graphtrain.cache.store import Cache, default_root
from graphtrain.cache.verify import Problem, Report

__all__ = [
    "Cache",
    "CacheWarning",
    "Collected",
    "Entry",
    "Explanation",
    "Neighbour",
    "Problem",
    "Report",
    "default_root",
]
