"""The options that several benchmarks have. A command's own are where it is declared."""

from kvshare_lab.cli.benchmark import VLLM, Option

SEED = Option("seed", int, "Seed of the prompts and of everything else that is drawn.")
REPEATS = Option("repeats", int, "Measurements per figure.", min=1)
PROMPT_TOKENS = Option("prompt_tokens", int, "Length of the prompts, in tokens.", min=1)
CHANGED = Option("changed", float, "Share of the tokens that are replaced.", min=0, max=1)
EDITS = Option("edits", int, "Number of places where tokens are replaced.", min=0)
STORED = Option("stored", int, "Prompts that are stored before.", min=1)
CONCURRENCY = Option("concurrency", int, "Number of clients.", min=1)
MODEL = Option("model", str, "A folder, a name, default or demo. [default: default]")
THREADS = Option("threads", int, "Threads of the model. [default: all cores]", min=1)
MAX_DEVIATION = Option("max_deviation", float, "Overrides the setting sharing.max_deviation.", min=0)

# of vLLM's servers
SERVED_MODEL = Option(
    "model",
    str,
    "vLLM: random-8b, or a folder or name that it takes. [default: small random weights]",
    engine=VLLM,
)
SERVED_THREADS = Option(
    "threads", int, "Threads of each vLLM. [default: all cores but one]", min=1, engine=VLLM
)
DTYPE = Option("dtype", str, "Data type of the vLLM servers. [default: bfloat16]", engine=VLLM)
KV_DTYPE = Option(
    "kv_cache_dtype", str, "Data type of vLLM's KV cache, as fp8. [default: that of the weights]", engine=VLLM
)
EAGER = Option("eager", bool, "vLLM without compiling the model. [default: compiled]", engine=VLLM)
