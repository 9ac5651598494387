"""
The lab of KVShare: it measures the product and fits its constants. The product never imports it.

    bench/       benchmarks of the embedded engine and of single parts, behind `kvshare bench NAME`
    vllm/        benchmarks that start real vLLM servers
    fidelity/    how far answers after shared KV differ from those after a full prefill
    demo_model/  the forms and questions that the demo model was trained on
"""

__version__ = "0.3.0"
