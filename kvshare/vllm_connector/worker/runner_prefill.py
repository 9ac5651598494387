"""
A prompt that vLLM's model runner computes, as it does for a request: the target, a token, and its drafts.

The self-test compares our passes with it. The steps are made by hand, as vLLM makes them to warm up model
runner V2; runner V1 takes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

_NAME = "kvshare-self-test"  # of the request; the first real one comes after it has ended


class RunnerPrefill:
    """Used before the first request. All ranks call it together."""

    def __init__(self, worker: Any) -> None:
        """`worker`: vLLM's, whose model is loaded and whose KV cache is there."""
        self._worker = worker

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a prompt."""
        limits = self._worker.vllm_config.scheduler_config
        return int(getattr(limits, "max_num_scheduled_tokens", None) or limits.max_num_batched_tokens)

    @property
    def num_drafts(self) -> int:
        return int(self._worker.vllm_config.num_speculative_tokens)

    def compute(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """
        Compute a prompt in one step, and forget its request.

        `block_ids`: free ones, with room for the prompt and `num_drafts` more tokens
        """
        with _without_connector(self._worker.model_runner):
            try:
                self._worker.execute_model(_step(token_ids, block_ids, num_drafts=self.num_drafts))
                self._worker.sample_tokens(None)
            finally:
                ended = SchedulerOutput.make_empty()
                ended.finished_req_ids = {_NAME}
                self._worker.execute_model(ended)


def _step(token_ids: Sequence[int], block_ids: Sequence[int], *, num_drafts: int) -> SchedulerOutput:
    """Make a step with one new request."""
    tokens = list(token_ids)
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [
        NewRequestData(
            req_id=_NAME,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.0, max_tokens=num_drafts + 1, seed=0),
            pooling_params=None,
            block_ids=(list(block_ids),),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=tokens,
        )
    ]
    step.num_scheduled_tokens = {_NAME: len(tokens)}
    step.total_num_scheduled_tokens = len(tokens)
    step.num_spec_tokens_to_schedule = num_drafts
    return step


@contextmanager
def _without_connector(runner: Any) -> Iterator[None]:
    """Hide the connector from vLLM: the steps inside have no metadata for it."""
    driver = getattr(runner, "kv_connector", None)  # of model runner V2
    connector = kv_transfer_state._KV_CONNECTOR_AGENT
    if driver is not None:
        driver.set_disabled(True)
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    try:
        yield
    finally:
        if driver is not None:
            driver.set_disabled(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = connector
