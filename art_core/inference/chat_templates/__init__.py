"""Chat templates: files to give as `EngineConfig.chat_template`.

Invariant: a template renders an answered prompt so that it begins with the prompt itself, generation prompt
included, so what is fine-tuned is what is served.
"""

from pathlib import Path

CHATML_JSON_TOOLS: Path = Path(__file__).with_name("chatml_json_tools.jinja")
"""ChatML whose tool calls are a bare JSON list, for models that cannot write tags around them.

Calls need no token beside those of ordinary text and ``<|im_end|>``. vLLM's ``llama3_json`` and the embedded
engine read them.
"""
