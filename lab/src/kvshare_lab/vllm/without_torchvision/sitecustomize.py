"""Python reads this when it starts, in each process of a vLLM whose PYTHONPATH begins with this folder."""

from kvshare_lab.vllm.absent_torchvision import name_in_this_server

name_in_this_server()
