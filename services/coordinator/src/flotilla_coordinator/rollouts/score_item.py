"""A sample as the reward service reads it: text, ids, and what the data set says about the prompt."""

from __future__ import annotations

import numpy as np
from google.protobuf.struct_pb2 import Struct

from flotilla.reward.v1 import reward_pb2 as pb
from flotilla_coordinator.data.prompts import Prompt
from flotilla_core.tensors import to_tensor


def score_item(sample_id: str, prompt: Prompt, response: str, token_ids: np.ndarray) -> pb.ScoreItem:
    """One item of a Score call."""
    info = Struct()
    info.update(prompt.info)
    return pb.ScoreItem(
        sample_id=sample_id,
        prompt=prompt.prompt_text,
        response=response,
        response_token_ids=to_tensor(token_ids),
        answer=prompt.answer,
        info=info,
    )
