"""Several vLLM replicas as one engine. Plans are made here; `kvshare.vllm_connector` executes them."""
