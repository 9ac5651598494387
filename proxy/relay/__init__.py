"""The /v1 routes in front of vLLM: requests are planned and relayed, answers are passed on."""
