"""langchain-tests' integration suite for ChatART on a real model that calls tools: Qwen2.5-Coder-0.5B.

It starts a vLLM of its own, needs 1.2 GB of weights and takes minutes on a CPU, so it runs when asked for:
``make test MODEL="smollm2 tokenizers qwen"``, or pytest's ``--qwen``. Skipped in the suite: images, PDF,
audio and Anthropic's blocks.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from art_core.config import EngineConfig, LoRAConfig
from art_core.inference.endpoint import StaticEndpoint
from art_core.types import PolicyVersion
from art_langgraph import ChatART
from examples.prepare_model import qwen2_5_coder

BEYOND_THE_MODEL = {
    "test_agent_loop": "the model answers by itself where the suite wants the tool called",
    "test_structured_output_optional_param": "the model fills JSON strings until the token limit",
    "test_tool_calling_with_no_arguments": "the model repeats the schema as the arguments",
}


@pytest.fixture(scope="module")
def qwen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not request.config.getoption("--qwen"):
        pytest.skip("takes minutes on a CPU and a model of 1.2 GB: ask for it with --qwen")
    from art_core.inference.vllm import VLLMEngine

    logs: Path = tmp_path_factory.mktemp("logs")
    config = EngineConfig(max_model_len=2048, max_batch=8, start_timeout=900)
    engine = VLLMEngine(str(qwen2_5_coder()), config, LoRAConfig(rank=4), "agent", logs)
    asyncio.run(engine.start())
    try:
        asyncio.run(engine.publish(PolicyVersion("agent", 0), None))
        yield engine.base_url
    finally:
        asyncio.run(engine.close())


class TestChatARTOnQwen(ChatModelIntegrationTests):
    endpoint: ClassVar[StaticEndpoint]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served_policy(cls, qwen: str) -> None:
        cls.endpoint = StaticEndpoint(qwen, "agent@0")

    @pytest.fixture(autouse=True)
    def _within_the_model(self, request: pytest.FixtureRequest) -> None:
        if reason := BEYOND_THE_MODEL.get(request.node.originalname):
            request.applymarker(pytest.mark.xfail(reason=reason, strict=False))

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatART

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"endpoint": self.endpoint}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 128, "timeout": 240}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "agent"
