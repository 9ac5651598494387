"""
Several vLLM replicas as one engine: plans are made here; `kvshare.vllm_connector` executes them in vLLM.
"""
