"""The side of the connector that runs in every worker process of vLLM (tensor parallel rank)."""
