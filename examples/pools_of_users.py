"""Keep a pool for each user on disk, draft for each from their own text alone, and delete one."""

import tempfile

from ngram_pool import PoolStore

TEXTS = {
    "alice": "my password is swordfish and my cat is called tom and my password is swordfish too",
    "bob": "my garden is green and my cat is called jerry",
}
WORDS = sorted({word for text in TEXTS.values() for word in text.split()})


def ids_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def show(store: PoolStore, user: str, text: str) -> None:
    with store.open(user) as pool:  # or lade.generate(model, pool=store.named(user), …)
        draft = pool.draft(ids_of(text), max_draft_tokens=1)
    print(f"{user}: {text} ->", *(WORDS[token_id] for token_id in draft.token_ids))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, PoolStore(folder, memory_bytes=2**26) as store:
        for user, text in TEXTS.items():
            with store.open(user) as pool:
                pool.observe(ids_of(text), None)
        show(store, "alice", "my password is")
        show(store, "bob", "my password is")
        print("deleted:", store.delete("alice"))
        show(store, "alice", "my password is")
        print("still kept:", ", ".join(store.names()))


if __name__ == "__main__":
    main()
