"""All errors that a user can fix, of every package; graphtrain.errors imports no other package."""

from graphtrain.errors import GraphtrainError
from lowering.errors import LoweringError
from sharding_rules.errors import ShardingError

USER_ERRORS = (GraphtrainError, LoweringError, ShardingError)
