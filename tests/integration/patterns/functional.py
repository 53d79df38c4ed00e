"""The functional API: an entrypoint whose tasks call the model, two of them at the same time."""

from integration.patterns.table import Call, Par, Pattern, Seq
from langchain_core.language_models import BaseChatModel
from langgraph.func import entrypoint, task


def build(llm: BaseChatModel):
    @task
    def name(animal: str) -> str:
        return llm.invoke(f"Name a {animal}").text

    @entrypoint()
    def story(animals: list[str]) -> str:
        futures = [name(animal) for animal in animals]
        names = " and ".join(future.result() for future in futures)
        return llm.invoke(f"A story of {names}").text

    return story


def abuild(llm: BaseChatModel):
    @task
    async def name(animal: str) -> str:
        return (await llm.ainvoke(f"Name a {animal}")).text

    @entrypoint()
    async def story(animals: list[str]) -> str:
        futures = [name(animal) for animal in animals]
        names = " and ".join([await future for future in futures])
        return (await llm.ainvoke(f"A story of {names}")).text

    return story


PATTERN = Pattern(
    build,
    abuild=abuild,
    inputs=(["cat", "dog"],),
    expected=Seq(
        Par(
            Call("story:1|name:1", 0, ("user: Name a cat",), "Tom"),
            Call("story:1|name:2", 0, ("user: Name a dog",), "Rex"),
        ),
        Call("story:1", 0, ("user: A story of Tom and Rex",), "They met."),
    ),
)
