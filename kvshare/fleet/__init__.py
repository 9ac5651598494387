"""Several vLLMs as one engine: planned here, computed there, where `kvshare.vllm_connector` runs."""
