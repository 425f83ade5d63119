"""Errors of all packages that a user can fix.

Separate from graphtrain.errors, which imports no other package.
"""

from graphtrain.errors import GraphtrainError
from lowering.errors import LoweringError
from sharding_rules.errors import ShardingError

USER_ERRORS = (GraphtrainError, LoweringError, ShardingError)
