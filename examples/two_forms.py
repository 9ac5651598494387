"""Two users send nearly the same form to `kvshare serve --model demo`: where do the tokens come from?"""

import json
import os
import sys
from pathlib import Path

import openai

client = openai.OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"),
    api_key=os.environ.get("OPENAI_API_KEY", "none"),
)
forms = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
try:
    for messages in (forms["first"], forms["second"]):
        reply = client.chat.completions.create(model="kvshare-demo", messages=messages, temperature=0)
        print(reply.choices[0].message.content, reply.usage.kvshare)  # noqa: T201
except openai.APIConnectionError:
    sys.exit(
        f"no server answers at {client.base_url}: start `kvshare serve --model demo`, or set OPENAI_BASE_URL"
    )
except openai.NotFoundError:
    sys.exit("this server runs another model: start `kvshare serve --model demo`")
print("right answer to the second:", forms["answer"])  # noqa: T201
