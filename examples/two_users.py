"""Two guests ask about one long text, each with another name at its top. Needs a running `make serve`."""

import os
import sys
import time

import openai

from kvshare.chat_model import EXAMPLE_TEXT

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
try:
    model = client.models.list().data[0].id
except openai.APIConnectionError:
    sys.exit(f"no server answers at {client.base_url}: run `make serve`, or set OPENAI_BASE_URL")
if model == "kvshare-demo":
    sys.exit("this server runs the forms model, which understands its forms only: try examples/two_forms.py")

SHOWN = ("exact", "copied", "recomputed", "repaired", "decision", "reason")
text = EXAMPLE_TEXT.read_text(encoding="utf-8")
for guest in ("Ann Keller", "Maria Lopez"):
    prompt = f"The name of the guest is {guest}.\n\n{text}\nWhat is the name of the guest?"
    answer, first_token_s, usage = "", 0.0, None
    asked_at = time.perf_counter()
    reply = client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in reply.parse():
        if chunk.choices and chunk.choices[0].delta.content:
            first_token_s = first_token_s or time.perf_counter() - asked_at
            answer += chunk.choices[0].delta.content
        usage = chunk.usage or usage
    found = getattr(usage, "kvshare", None)  # in front of vLLM only headers tell it
    shared = {name: found[name] for name in SHOWN} if found else reply.headers.get("x-kvshare-plan")
    print(f"{answer}\n  first token after {first_token_s:.2f} s, {shared}")  # noqa: T201
