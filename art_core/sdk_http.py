"""The HTTP library that OpenAI's SDK stands on: httpx (before 3.0) or httpx2, of the same API but quicker."""

from importlib import import_module
from typing import TYPE_CHECKING

import openai

if TYPE_CHECKING:
    import httpx as httpx
else:
    _sdk = next(base for base in openai.DefaultHttpxClient.__mro__ if base.__name__ == "Client")
    httpx = import_module(_sdk.__module__.partition(".")[0])
