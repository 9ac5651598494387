"""The vLLM engine: plans here, computes in stock vLLM. `kvshare.vllm_connector` is its half over there."""
