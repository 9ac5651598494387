"""
The lab of KVShare: it measures the product and fits its constants. The product never imports it.

    cli/         `kvshare bench NAME` and `kvshare calibrate`
    bench/       benchmarks of the embedded engine and of single parts
    vllm/        benchmarks that start real vLLM servers
    device/      vLLM and the connector on a GPU that is simulated
    fidelity/    how far answers after shared KV differ from those after a full prefill
    calibration/ fits what servers predict of a model's answers
    drafting/    trains heads that draft, on a model's own answers
    demo_model/  the forms and questions that the demo model was trained on
    checkout.py  the commit that published documents carry
"""

__version__ = "0.3.0"
