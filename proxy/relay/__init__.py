"""The /v1 routes in front of vLLM: requests are planned and forwarded, answers are relayed."""
