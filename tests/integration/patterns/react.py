"""ReAct: `create_agent` calls tools until it can answer; one of its tools asks the model too."""

from integration.patterns.table import Call, Pattern, Seq, tool
from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool as make_tool


def build(llm: BaseChatModel):
    @make_tool
    def weather(city: str) -> str:
        """The weather in a city."""
        return f"21 degrees in {city}"

    @make_tool
    def translate(text: str) -> str:
        """The text in French."""
        return llm.invoke(f"In French: {text}").text

    return create_agent(llm, [weather, translate], system_prompt="Be brief.", name="assistant")


ASK = ("system: Be brief.", "user: Weather in Paris? Say bye in French.")
FIRST = (tool("weather", city="Paris"), tool("translate", text="bye"))
SECOND = (*ASK, 'assistant: weather(city="Paris"); translate(text="bye")')
THIRD = (*SECOND, "tool: 21 degrees in Paris", "tool: au revoir")

PATTERN = Pattern(
    build,
    inputs=({"messages": [("user", "Weather in Paris? Say bye in French.")]},),
    expected=Seq(
        Call("model:1", 1, ASK, FIRST),
        Call("tools:1", 2, ("user: In French: bye",), "au revoir"),
        Call("model:2", 3, THIRD, "21 degrees; au revoir."),
    ),
)
