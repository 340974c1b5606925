"""Serve a model to OpenAI's clients from a program, as `lade serve` does, and ask it."""

import openai

import lade
from lade.apps.server.app import Server
from lade.apps.server.options import ServerOptions


def main() -> None:
    options = ServerOptions(api_keys=["alice-key"], max_queue=10)
    with (
        Server(lade.models.load(), options, port=0) as server,
        openai.OpenAI(base_url=server.url, api_key="alice-key") as client,
    ):
        for _ in range(2):  # the second answer is drafted from the first
            answer = client.chat.completions.create(
                model=server.name,
                messages=[{"role": "user", "content": "What-is-a-pool?"}],
                temperature=0,
                max_tokens=40,
            )
            assert answer.usage is not None
            details = answer.usage.completion_tokens_details
            assert details is not None
            number = details.model_dump()["accepted_draft_tokens"]
            print(f"{answer.choices[0].message.content!r}: {number} of its tokens were drafted")


if __name__ == "__main__":
    main()
