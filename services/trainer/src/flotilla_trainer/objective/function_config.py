"""The names and parameters of a session's functions, checked by the models that check a run's configuration.

Invariant: there is one list of advantages and losses with their parameters, ranges and defaults, and it is theirs.
"""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from flotilla.trainer.v1 import session_pb2 as pb
from flotilla_core.config.advantages import AdvantageSection
from flotilla_core.config.losses import LossSection
from flotilla_core.errors import InvalidRequest
from flotilla_core.structs import to_json
from flotilla_trainer.wire.user_functions import is_user_function

ADVANTAGE: TypeAdapter[Any] = TypeAdapter(AdvantageSection)
LOSS: TypeAdapter[Any] = TypeAdapter(LossSection)


def checked_section(adapter: TypeAdapter[Any], function: pb.Function, where: str) -> Any:
    """The section that a function on the wire stands for."""
    parameters = to_json(function.parameters)
    if is_user_function(function.name):
        parameters = {"parameters": parameters}
    try:
        return adapter.validate_python({"type": function.name, **parameters})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc'][1:]))} {item['msg']}" for item in error.errors()]
        raise InvalidRequest(
            f"{function.name or 'a function without a name'} cannot be used so",
            where=where,
            why="; ".join(problem.strip() for problem in problems),
        ) from error
