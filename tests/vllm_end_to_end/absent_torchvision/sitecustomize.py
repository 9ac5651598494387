"""Python reads this when it starts, in each process of a vLLM whose PYTHONPATH begins with this folder."""

from tests.kvshare.vllm_connector.absent_torchvision import add_name

add_name()
