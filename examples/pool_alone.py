"""Use the pool without any model: learn a text word by word, and guess how it goes on."""

from ngram_pool import NGramPool

TEXT = "the cat sat on the mat and the cat sat on the chair and the dog sat on the cat"


def main() -> None:
    words = TEXT.split()
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    names = list(ids)
    pool = NGramPool(capacity_tokens=1000)
    pool.observe([ids[word] for word in words])
    draft = pool.draft([ids["the"], ids["cat"]], max_draft_tokens=6, max_candidates=3)
    for candidate in draft.candidates():
        print("the cat", *(names[token_id] for token_id in candidate))


if __name__ == "__main__":
    main()
